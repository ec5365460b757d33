"""Row 23: however many ranks start at once, one of them compiles and the others wait quietly."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from loaders import Compiler, Loader, leaves, let_rest, returning, write
from sample import forks
from sample.child import SOURCE
from sample.quiet import within
from sample.tracing import calls, strace

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(23), pytest.mark.timed]

PATIENCE = 600.0

RANK = """
import sys
import opkiln
from opkiln.base import digest
digest._SETTLED_NS = 20_000_000
library = opkiln.load(
    "op", [sys.argv[1]], is_python_module=False, abi=sys.argv[2]
)
if isinstance(library, str):
    import ctypes
    library = ctypes.CDLL(library)
sys.exit(0 if library.value() == 23 else 3)
"""


def start(source: Path, abi: str, errors: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OPKILN_PROGRESS": "off"}
    if abi != "none":
        # torch's own bytecode is beside its sources: to make it anew takes ten seconds.
        del env["PYTHONPYCACHEPREFIX"]
        env["PYTHONDONTWRITEBYTECODE"] = "1"
    with errors.open("ab") as log:
        return forks.Fork(["-c", RANK, str(source), abi], bare=abi == "none", stderr=log, env=env)


def endings(ranks: list[subprocess.Popen[str]]) -> Counter[int]:
    deadline = time.monotonic() + PATIENCE
    try:
        return Counter(rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("abi", "whole", "one_in"), [("torch-stable", 64, 10), ("none", 1000, 50)],
    ids=["with torch", "without torch"],
)  # fmt: skip
def test_ranks_that_start_at_once_on_a_cold_cache_compile_once(
    abi: str,
    whole: int,
    one_in: int,
    tmp_path: Path,
    cache: Path,
    scratch: Path,
    compiler: Compiler,
    cases: Cases,
) -> None:
    source = write(tmp_path / "op.cpp", returning(23))
    compiler.take(1)
    let_rest()  # what one of them learns of the compiler is believed by the others
    errors = tmp_path / "errors"
    ranks = [start(source, abi, errors) for _ in cases(whole, one_in=one_in)]
    assert endings(ranks) == {0: cases.number}, errors.read_text()[-2000:]
    assert errors.read_text() == ""
    assert compiler.compiles == 1
    assert len(leaves(cache)) == 1
    assert list(scratch.iterdir()) == []


def test_who_waits_hardly_touches_the_file_system(tmp_path: Path, compiler: Compiler) -> None:
    warm, source = (
        write(tmp_path / "warm.cpp", returning(1)),
        write(tmp_path / "op.cpp", returning(2)),
    )
    log = tmp_path / "log"
    looked = "stat,lstat,newfstatat,statx,access,readlink,getdents64,fcntl"
    with Loader() as builder, Loader(prefix=strace(log, looked)) as waiter:
        assert [each.load("warm", warm).value for each in (builder, waiter)] == [1, 1]
        compiler.take(3)
        begun = compiler.compiles
        builder.ask("op", source)
        assert within(30, lambda: compiler.compiles > begun)
        waiter.ask("op", source)
        time.sleep(1.0)  # it has looked for the op, found none, and waits
        before = len(calls(log))
        time.sleep(1.0)
        during = len(calls(log)) - before
        assert [builder.answer().value, waiter.answer().value] == [2, 2]
    # All calls that look at, open or write files: a few looks a second.
    assert during < 500, during
