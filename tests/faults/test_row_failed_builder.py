"""Row 4: when the one builder fails, everybody who waited for it sees the compiler's error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loaders import Compiler, Loader, returning, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(4), pytest.mark.timed]

PROCESSES = 8


def test_all_who_wait_for_a_failing_build_see_the_compilers_first_error(
    tmp_path: Path, compiler: Compiler, processes: Callable[..., list[Loader]], cases: Cases
) -> None:
    count = cases.count(PROCESSES, least=4)
    cases.tried(count)
    running = processes(count)
    warm = write(tmp_path / "warm.cpp", returning(1))
    assert [each.load("warm", warm).value for each in running] == [1] * count
    before = compiler.compiles
    compiler.take(1)
    bad = write(tmp_path / "bad.cpp", returning("undeclared_name") + "int other = another_one;\n")
    for each in running:
        each.ask("bad", bad)
    answers = [each.answer() for each in running]
    assert [answer.error for answer in answers] == ["CompileError"] * count, answers
    for answer in answers:
        assert "error: 'undeclared_name' was not declared" in answer.text
        assert "another_one" not in answer.text
        assert "cannot open shared object" not in answer.text
    assert compiler.compiles - before == 1


def test_whoever_comes_after_the_failure_tries_anew(
    tmp_path: Path, compiler: Compiler, processes: Callable[..., list[Loader]]
) -> None:
    (process,) = processes(1)
    source = write(tmp_path / "op.cpp", returning("undeclared_name"))
    assert process.load("op", source).error == "CompileError"
    assert process.load("op", source).error == "CompileError"
    assert compiler.compiles == 2
    write(source, returning(3))
    assert process.load("op", source).value == 3
