"""Very many short-lived processes load from one store: one compile, and a hit is a few reads."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from loaders import Compiler, leaves, let_rest, returning, write
from sample import child, forks
from sample.child import SOURCE
from sample.tracing import WRITING, calls, strace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.timed


LOAD = """
import sys
import opkiln
from opkiln.base import digest
digest._SETTLED_NS = 20_000_000
library = opkiln.load("op", [sys.argv[1]], is_python_module=False, abi="none")
sys.exit(0 if library.value() == 5 else 3)
"""

# One load after another of its kind, so that all modules are there, between two calls that no load
# makes.
TRACED = """
import os, sys
import opkiln
from opkiln.base import digest
digest._SETTLED_NS = 20_000_000
def mark(name):
    try:
        os.rmdir(name)
    except OSError:
        pass
def load(name):
    source = os.path.join(sys.argv[1], name + ".cpp")
    return opkiln.load(name, [source], is_python_module=False, abi="none")
load("first")
mark("/begin-of-load")
library = load("op")
mark("/end-of-load")
assert library.value() == 5
"""

READING = {"open", "openat", "read", "pread64", "close", "lseek", "stat", "lstat", "fstat",
           "statx", "newfstatat", "access", "faccessat", "readlink", "readlinkat", "getdents64",
           "mmap",
           "munmap", "mprotect", "brk", "getcwd", "fcntl", "ioctl", "uname", "getuid", "getpid",
           "geteuid", "futex", "madvise", "mremap", "sched_getaffinity", "getrandom", "sysinfo",
           "statfs", "rt_sigprocmask", "clock_gettime", "gettid", "rmdir"}  # fmt: skip


def hit(sources: Path, log: Path) -> Counter[str]:
    """The system calls of one load that finds what it wants, by name."""
    child.run(TRACED, str(sources), env={"OPKILN_PROGRESS": "off"}, prefix=strace(log, "all"))
    names = [(call.name, call.path, call.arguments) for call in calls(log)]
    places = [index for index, (_, path, _) in enumerate(names) if path.endswith("-of-load")]
    first, last = places
    between = names[first + 1 : last]
    assert any(path.endswith("op.so") for _, path, _ in between)
    opened = [arguments for name, _, arguments in between if name.startswith("open")]
    assert not any(flag in text for text in opened for flag in ("O_WRONLY", "O_RDWR", "O_CREAT"))
    locks = [text for name, _, text in between if name == "fcntl" and "LK" in text]
    assert locks == []
    return Counter(name for name, _, _ in between)


def test_a_thousand_processes_load_what_one_of_them_compiled(
    tmp_path: Path,
    cache: Path,
    compiler: Compiler,
    cases: Cases,
    note: Callable[[str], None],
) -> None:
    source = write(tmp_path / "op.cpp", returning(5))
    let_rest()
    count, at_once = cases.count(1000, one_in=25), cases.count(50, least=20)
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OPKILN_PROGRESS": "off"}
    errors = tmp_path / "errors"
    left, running, ended = count, [], Counter[int]()
    with errors.open("wb") as log:
        while left or running:
            while left and len(running) < at_once:
                process = forks.Fork(["-c", LOAD, str(source)], bare=True, env=env, stderr=log)
                running.append(process)
                left -= 1
            ended[running.pop(0).wait(120)] += 1
    assert ended == {0: count}, errors.read_text()[-2000:]
    assert errors.read_bytes() == b""
    assert compiler.compiles == 1
    assert len(leaves(cache)) == 1
    note(f"{count} processes, {at_once} at a time: {compiler.compiles} compile, 0 errors")


def test_a_hit_reads_and_maps_and_neither_writes_nor_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]
) -> None:
    sources = tmp_path / "src"
    write(sources / "op.cpp", returning(5))
    write(sources / "first.cpp", returning(4))
    let_rest()
    for _ in range(2):  # built, and found: so that all bytecode is there, too
        child.run(TRACED, str(sources), env={"OPKILN_PROGRESS": "off"})
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    counted = hit(sources, tmp_path / "log")
    assert counted["getdents64"] == 0  # by a receipt, not by a search
    assert {"newfstatat", "openat", "mmap"} <= set(counted)
    assert set(counted) <= READING, set(counted) - READING
    written = set(WRITING.split(",")) - {"open", "openat", "execve"}
    assert not set(counted) & written
    shown = ", ".join(f"{number} {name}" for name, number in counted.most_common())
    note(f"a hit makes {counted.total()} system calls, none that writes or locks: {shown}")
