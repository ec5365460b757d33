"""Row 10: a clock that is wrong, and times in the future, cause no rebuild and no stale load."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from loaders import Compiler, Loader, returning, shim, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(10), pytest.mark.timed]

YEARS = 20 * 365 * 24 * 3600
HEADER = '#include "number.h"'


def set_times(path: Path, seconds: float) -> None:
    when = time.time() + seconds
    os.utime(path, (when, when))


def test_times_in_the_future_cause_no_rebuild(
    tmp_path: Path, cache: Path, compiler: Compiler, value: Callable[..., int], cases: Cases
) -> None:
    source = write(tmp_path / "op" / "src" / "op.cpp", returning("NUMBER", HEADER))
    header = write(source.with_name("number.h"), "#define NUMBER 5\n")
    for path in (source, header, source.parent, tmp_path / "op", compiler.path):
        set_times(path, YEARS)
    assert value(source) == 5
    for path in sorted(cache.rglob("*")):
        set_times(path, YEARS)
    assert compiler.compiles == 1
    for _ in cases(10, least=3):
        assert value(source) == 5
    assert compiler.compiles == 1


@pytest.mark.parametrize("hours", [-24 * 365 * 20, pytest.param(-1, marks=pytest.mark.full), 1])
def test_a_clock_that_is_wrong_causes_neither_rebuilds_nor_stale_loads(
    hours: int,
    tmp_path: Path,
    compiler: Compiler,
    processes: Callable[..., list[Loader]],
    cases: Cases,
) -> None:
    clock = shim("skewed_clock", tmp_path)
    source = write(tmp_path / "op" / "src" / "op.cpp", returning("NUMBER", HEADER))
    header = write(source.with_name("number.h"), "#define NUMBER 5\n")
    (skewed,) = processes(1, {"SKEW_SECONDS": str(hours * 3600)}, preload=clock)
    assert skewed.load("op", source).value == 5
    before = compiler.compiles
    for _ in cases(10, least=3):
        assert skewed.load("op", source).value == 5
    (right,) = processes(1)
    assert right.load("op", source).value == 5
    assert compiler.compiles == before
    write(header, "#define NUMBER 6\n")
    assert skewed.load("op", source).value == 6
    write(header, "#define NUMBER 7\n")
    assert right.load("op", source).value == 7
