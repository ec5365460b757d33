"""Row 31: a network file system that hides and forgets costs time, never a load."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, leaves, returning, shim, write
from sample.tracing import calls, strace

if TYPE_CHECKING:
    from collections.abc import Callable

    from fault_rows import Cases

pytestmark = [pytest.mark.row(31), pytest.mark.timed]

PROCESSES = 8
HIDE_MS = 700


@pytest.mark.parametrize(
    "faults", ["hiding", "stale", pytest.param("both", marks=pytest.mark.full)]
)
def test_loads_succeed_on_a_file_system_that_hides_and_forgets(
    faults: str,
    cases: Cases,
    tmp_path: Path,
    cache: Path,
    scratch: Path,
    processes: Callable[..., list[Loader]],
) -> None:
    env = {"NETWORK_ROOT": str(cache)}
    if faults != "stale":
        env["NETWORK_HIDE_MS"] = str(HIDE_MS)
    if faults != "hiding":
        env["NETWORK_STALE"] = "1"
    count = cases.count(PROCESSES, least=4)
    running = processes(count, env, preload=shim("slow_network", tmp_path))
    rounds = 100 if faults == "both" else 20
    for number in range(cases.count(rounds, one_in=40)):
        cases.tried(count)
        source = write(tmp_path / "op.cpp", returning(number))
        for each in running:
            each.ask("op", source)
        answers = [each.answer() for each in running]
        assert [answer.value for answer in answers] == [number] * count, answers
    # Whoever could not see an entry used a copy of its own, from the node's disk.
    if faults == "hiding":
        assert any(answer.path.is_relative_to(scratch) for answer in answers)
    time.sleep(HIDE_MS / 1000)
    (visible,) = processes(1)
    answer = visible.load("op", source)
    assert answer.value == number
    assert answer.path.is_relative_to(cache)
    if faults == "hiding":
        assert answer.origin == "store"


def test_an_entry_that_stays_hidden_costs_each_process_one_build_at_most(
    tmp_path: Path, cache: Path, scratch: Path, processes: Callable[..., list[Loader]]
) -> None:
    env = {"NETWORK_ROOT": str(cache), "NETWORK_HIDE_MS": "3600000"}
    running = processes(2, env, preload=shim("slow_network", tmp_path))
    source = write(tmp_path / "op.cpp", returning(31))
    answers = [each.load("op", source) for each in running]
    assert [answer.value for answer in answers] == [31, 31]
    assert all(answer.path.is_relative_to(scratch) for answer in answers)
    assert len(leaves(cache)) == 1
    for each in running:
        each.close()
    assert list(scratch.iterdir()) == []  # the copies go with their processes


OPENED_TWICE = """
import errno, os, sys
def stale():
    found = 0
    for number in range(256):
        try:
            os.close(os.open(f"{sys.argv[1]}/{number}", os.O_RDONLY))
        except OSError as error:
            found += error.errno == errno.ESTALE
    return found
print(stale(), stale())
"""


def test_the_shim_really_makes_handles_stale_once(tmp_path: Path, cache: Path) -> None:
    for number in range(256):
        write(cache / "files" / str(number), "")
    env = {"NETWORK_ROOT": str(cache), "NETWORK_STALE": "1"}
    env["LD_PRELOAD"] = shim("slow_network", tmp_path)
    command = [sys.executable, "-S", "-c", OPENED_TWICE, str(cache / "files")]
    first, second = subprocess.check_output(command, env=os.environ | env, text=True).split()
    assert 0 < int(first) < 128
    assert int(second) == 0


def test_compilers_write_to_the_node_alone(tmp_path: Path, cache: Path, scratch: Path) -> None:
    log = tmp_path / "log"
    source = write(tmp_path / "op.cpp", returning(31))
    with Loader(prefix=strace(log)) as process:
        assert process.load("op", source).origin == "built"
    program: dict[int, str] = {}
    compilers = {"g++", "cc1plus", "as", "collect2", "ld"}
    wrote: dict[str, set[str]] = {}
    for call in calls(log):
        if call.name == "execve" and not call.failed:
            program[call.pid] = os.path.basename(call.path)
        elif call.writes and not call.failed and program.get(call.pid) in compilers:
            wrote.setdefault(program[call.pid], set()).add(call.path)
    assert {"cc1plus", "as", "ld"} <= set(wrote)
    for paths in wrote.values():
        files = {path for path in paths if not path.startswith(("pipe:", "/dev/"))}
        assert all(Path(path).is_relative_to(scratch) for path in files), files
