"""Row 24: nothing rests on locks: where they fail or lie, work is repeated and nothing is wrong."""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, leaves, returning, shim, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(24), pytest.mark.timed]

PROCESSES = 8


@pytest.mark.parametrize("locks", ["missing", "lying"])
def test_processes_without_working_locks_load_the_right_library(
    locks: str,
    cases: Cases,
    tmp_path: Path,
    cache: Path,
    scratch: Path,
    processes: Callable[..., list[Loader]],
) -> None:
    chance = random.Random(24)
    count = cases.count(PROCESSES, least=4)
    preload = shim("lying_locks", tmp_path)
    running = processes(count, {"LOCKS": locks}, preload=preload)
    warm = write(tmp_path / "warm.cpp", returning(1))
    assert {each.load("warm", warm).value for each in running} == {1}
    for number in range(cases.count(100, one_in=100)):
        cases.tried(count)
        source = write(tmp_path / "op.cpp", returning(number))
        for each in running:
            each.ask("op", source)
        answers = [each.answer() for each in running]
        assert [answer.value for answer in answers] == [number] * count, answers
        assert [answer.warnings for answer in answers] == [[]] * count
        # Damage that all of them find, and mend, at once: nobody may remove what another loads.
        for leaf in leaves(cache):
            library = leaf / "op.so"
            if library.exists() and chance.random() < 0.7:
                data = library.read_bytes()
                library.unlink()  # others have it mapped: a new file, not a hole in theirs
                library.write_bytes(data[: len(data) // 2])
        if number % 3:
            continue
        fresh = processes(3, {"LOCKS": locks}, preload=preload)
        for each in fresh:
            each.ask("op", source)
        answers = [each.answer() for each in fresh]
        assert [answer.value for answer in answers] == [number] * len(fresh), answers
        for each in fresh:
            each.close()
    assert list(scratch.iterdir()) == []


def meeting(directory: Path) -> str:
    """A compiler that compiles op.cpp when two of them are about to: so no process can find what
    the other has published. One that stays alone goes on after a minute. They meet at a pipe: a
    file that one makes while the other looks for it would be an input that changes."""
    pipe = directory / "pipe"
    os.mkfifo(pipe)
    script = write(
        directory / "meeting" / "g++",
        f'#!/bin/sh\ncase "$*" in *" -c "*op.cpp*)\n'
        f"if mkdir {directory}/first 2>/dev/null; then timeout 60 cat {pipe} >/dev/null\n"
        f'else timeout 60 sh -c "echo >{pipe}"; fi;; esac\nexec {shutil.which("g++")} "$@"\n',
    )
    script.chmod(0o755)
    return str(script)


def test_the_shim_really_stands_between_processes_and_their_locks(
    tmp_path: Path, processes: Callable[..., list[Loader]]
) -> None:
    """Without locks nobody waits: each compiles for itself, which shows that the shim works."""
    running = processes(
        2, {"LOCKS": "lying", "CXX": meeting(tmp_path)}, preload=shim("lying_locks", tmp_path)
    )
    warm = write(tmp_path / "warm.cpp", returning(1))
    assert {each.load("warm", warm).value for each in running} == {1}
    source = write(tmp_path / "op.cpp", returning(2))
    for each in running:
        each.ask("op", source)
    assert [each.answer().compiled for each in running] == [1, 1]
