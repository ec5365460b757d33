"""Row 9: contents decide: an edit is seen, whatever time the file bears."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from loaders import let_rest, returning, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(9), pytest.mark.timed]

YEARS = 20 * 365 * 24 * 3600
HEADER = '#include "number.h"'


def set_times(path: Path, seconds: float) -> None:
    when = time.time() + seconds
    os.utime(path, (when, when))


def layout(root: Path, place: str) -> tuple[Path, Path, dict[str, list[str]]]:
    """(source, header, arguments): a header that reaches the compiler in one of many ways."""
    source = write(root / "src" / "op.cpp", returning("NUMBER", HEADER))
    header = root / "src" / "number.h"
    more: dict[str, list[str]] = {}
    if place == "include path":
        header = root / "include" / "number.h"
        more["extra_include_paths"] = [str(root / "include")]
    elif place == "parent":
        header = root / "other" / "number.h"
        write(source, returning("NUMBER", '#include "../other/number.h"'))
    elif place == "system flag":
        header = root / "include" / "number.h"
        more["extra_cflags"] = ["-isystem", str(root / "include")]
    elif place == "forced":
        header = root / "forced" / "number.h"
        write(source, returning("NUMBER"))
        more["extra_cflags"] = ["-include", str(header)]
    elif place == "linked directory":
        # src/link/../number.h is not src/number.h: the link leads elsewhere.
        (root / "far" / "inner").mkdir(parents=True)
        (root / "src" / "link").symlink_to(root / "far" / "inner")
        header = root / "far" / "number.h"
        write(root / "src" / "number.h", "#define NUMBER -1\n")
        write(source, returning("NUMBER", '#include "link/../number.h"'))
    return source, header, more


PLACES = ("beside", "include path", "parent", "system flag", "forced", "linked directory")


def test_an_edit_is_seen_whatever_time_it_bears(
    cases: Cases, tmp_path: Path, value: Callable[..., int]
) -> None:
    chance = random.Random(9)
    count = cases.count(100, least=len(PLACES), one_in=20)
    made = [layout(tmp_path / str(index), PLACES[index % len(PLACES)]) for index in range(count)]
    for index, (_, header, _) in enumerate(made):
        write(header, f"#define NUMBER {1000 + index}\n")
        set_times(header, chance.uniform(-YEARS, 0))
    let_rest()  # from here on signatures are believed
    for index, (source, _, more) in enumerate(made):
        assert value(source, f"op{index}", **more) == 1000 + index
    for index, (source, header, more) in enumerate(made):
        cases.tried()
        before = header.stat()
        write(header, f"#define NUMBER {2000 + index}\n")  # the same size, too
        if index % 3:
            set_times(header, chance.uniform(-YEARS, YEARS))
        else:
            os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert value(source, f"op{index}", **more) == 2000 + index, header
