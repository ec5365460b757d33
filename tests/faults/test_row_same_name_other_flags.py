"""Row 5: two builds of one name with other flags, at the same time, are never taken for another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loaders import Loader, returning, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(5), pytest.mark.timed]

PROCESSES = 8


def test_each_process_gets_the_library_of_its_own_flags(
    cases: Cases, tmp_path: Path, processes: Callable[..., list[Loader]]
) -> None:
    count = cases.count(PROCESSES, least=4)
    running = processes(count)
    for number in range(cases.count(100, one_in=33)):
        cases.tried(count)
        source = write(tmp_path / "op.cpp", returning(f"{number} * 10 + VALUE"))
        wanted = [1 + (index + number) % 2 for index in range(count)]
        for process, flag in zip(running, wanted, strict=True):
            process.ask("op", source, extra_cflags=[f"-DVALUE={flag}"])
        got = [process.answer().value for process in running]
        assert got == [number * 10 + flag for flag in wanted]


def test_two_inline_texts_under_one_name_are_two_libraries(
    cases: Cases, processes: Callable[..., list[Loader]]
) -> None:
    running = processes(2)
    for number in range(cases.count(5, least=2)):
        for index, process in enumerate(running):
            process.ask("op", text=returning(number * 10 + index))
        assert [each.answer().value for each in running] == [number * 10, number * 10 + 1]
