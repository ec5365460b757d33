"""Rows 9 and 10: contents decide, whatever the clocks and the timestamps say."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, let_rest, returning, shim, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Compiler

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


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.full)])
def test_an_edit_is_seen_whatever_time_it_bears(
    count: int, tmp_path: Path, value: Callable[..., int]
) -> None:
    chance = random.Random(9)
    made = [layout(tmp_path / str(index), PLACES[index % len(PLACES)]) for index in range(count)]
    for index, (_, header, _) in enumerate(made):
        write(header, f"#define NUMBER {1000 + index}\n")
        set_times(header, chance.uniform(-YEARS, 0))
    let_rest()  # from here on signatures are believed
    for index, (source, _, more) in enumerate(made):
        assert value(source, f"op{index}", **more) == 1000 + index
    for index, (source, header, more) in enumerate(made):
        before = header.stat()
        write(header, f"#define NUMBER {2000 + index}\n")  # the same size, too
        if index % 3:
            set_times(header, chance.uniform(-YEARS, YEARS))
        else:
            os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert value(source, f"op{index}", **more) == 2000 + index, header


def test_times_in_the_future_cause_no_rebuild(
    tmp_path: Path, cache: Path, compiler: Compiler, value: Callable[..., int]
) -> None:
    source, header, _ = layout(tmp_path / "op", "beside")
    write(header, "#define NUMBER 5\n")
    for path in (source, header, source.parent, tmp_path / "op", compiler.path):
        set_times(path, YEARS)
    assert value(source) == 5
    for path in sorted(cache.rglob("*")):
        set_times(path, YEARS)
    assert compiler.compiles == 1
    for _ in range(10):
        assert value(source) == 5
    assert compiler.compiles == 1


@pytest.mark.parametrize("hours", [-24 * 365 * 20, -1, 1])
def test_a_clock_that_is_wrong_causes_neither_rebuilds_nor_stale_loads(
    hours: int, tmp_path: Path, compiler: Compiler, processes: Callable[..., list[Loader]]
) -> None:
    clock = shim("skewed_clock", tmp_path)
    source, header, _ = layout(tmp_path / "op", "beside")
    write(header, "#define NUMBER 5\n")
    (skewed,) = processes(1, {"SKEW_SECONDS": str(hours * 3600)}, preload=clock)
    assert skewed.load("op", source).value == 5
    before = compiler.compiles
    for _ in range(9):
        assert skewed.load("op", source).value == 5
    (right,) = processes(1)
    assert right.load("op", source).value == 5
    assert compiler.compiles == before
    write(header, "#define NUMBER 6\n")
    assert skewed.load("op", source).value == 6
    write(header, "#define NUMBER 7\n")
    assert right.load("op", source).value == 7
