"""Row 1: a builder that is killed never blocks the others, and leaves nothing that loads wrong."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from loaders import Compiler, Loader, leaves, returning, write
from sample.quiet import within

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(1), pytest.mark.timed]

PROCESSES = 8
KILLED = 4  # of the processes of a round


def test_killed_builders_block_nobody_and_leave_nothing_wrong(
    cases: Cases,
    tmp_path: Path,
    cache: Path,
    scratch: Path,
    compiler: Compiler,
    processes: Callable[..., list[Loader]],
) -> None:
    chance = random.Random(1)
    compiler.take(0.4)
    began = time.monotonic()
    (first,) = processes(1)
    assert first.load("first", write(tmp_path / "first.cpp", returning(1))).value == 1
    compile_seconds = time.monotonic() - began
    for number in range(cases.count(200, one_in=50) // KILLED):
        source = write(tmp_path / "op.cpp", returning(number))
        running = processes(PROCESSES)
        for each in running:
            each.ask("op", source)
        for victim in running[:KILLED]:
            time.sleep(chance.uniform(0, 0.5))
            cases.tried()
            victim.kill()
        killed = time.monotonic()
        for survivor in running[KILLED:]:
            left = compile_seconds + 5 - (time.monotonic() - killed)
            assert within(max(left, 0.1), survivor.has_answered), "a survivor hangs"
            answer = survivor.answer()
            assert answer.value == number, answer
            survivor.close()
    whole = {"manifest.json", "inputs.json", "build.log"}
    for leaf in leaves(cache):
        assert whole < {path.name for path in leaf.iterdir()}
    assert within(5, lambda: not any(scratch.iterdir())), list(scratch.iterdir())
