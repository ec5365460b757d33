"""Many processes that load an op whose compiler hangs: when does each of them end?

    python bench/waiters.py [PROCESSES] [SECONDS] [BUSY]

The processes have loaded another op before and imported what a build imports: what is measured is
the wait, not the start of 64 interpreters. That is printed apart. Prints how long each load took
until its error, and what the errors said. SECONDS (6) is ``OPKILN_BUILD_TIMEOUT``. BUSY (0) is how
many other processes compute all the while.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

_LOAD = """
import sys, time, opkiln
from opkiln.errors import OpkilnError
how = {"is_python_module": False, "abi": "none"}
opkiln.load("warm", [sys.argv[1]], **how)
import opkiln.building.build, opkiln.building.reporting, opkiln.run.progress  # in every build
print("ready", flush=True)
sys.stdin.readline()
began = time.monotonic()
try:
    opkiln.load("op", [sys.argv[2]], **how)
except OpkilnError as error:
    print(f"{time.monotonic() - began:.2f} {type(error).__name__}: {error.what}")
"""
_COMPILER = """#!/bin/sh
case "$*" in *' -c '*op.cpp*) sleep 600;; esac
exec {real} "$@"
"""


def main(processes: int, limit: float, busy: int) -> int:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with tempfile.TemporaryDirectory(prefix="opkiln-waiters-") as name:
            return _measure(Path(name), processes, limit, busy)
    finally:
        for other in others:
            other.kill()
            other.wait()


def _measure(base: Path, processes: int, limit: float, busy: int) -> int:
    compiler = base / "g++"
    compiler.write_text(_COMPILER.format(real=shutil.which("g++")))
    compiler.chmod(0o755)
    sources = [base / "warm.cpp", base / "op.cpp"]
    for path in sources:
        path.write_text('extern "C" int value() { return 1; }\n')
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "OPKILN_CACHE_DIR": str(base / "cache"),
        "OPKILN_RUNTIME_DIR": str(base / "run"),
        "OPKILN_BUILD_TIMEOUT": f"{limit:g}",
    }
    time.sleep(2.1)  # what is remembered of a program that was just made is not believed
    first = [sys.executable, "-c", _LOAD.partition("print")[0], str(sources[0])]
    subprocess.run(first, env={**environment, "OPKILN_BUILD_TIMEOUT": "600"}, check=True)
    children = []
    began = time.monotonic()
    for _ in range(processes):
        child = subprocess.Popen(
            [sys.executable, "-c", _LOAD, *map(str, sources)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        children.append(child)
    for child in children:
        if child.stdout is None or child.stdout.readline() != "ready\n":
            raise RuntimeError("a process could not load the first op")
    ready = time.monotonic() - began
    for child in children:
        if child.stdin is not None:
            child.stdin.write("go\n")
            child.stdin.flush()
    took: list[float] = []
    said: Counter[str] = Counter()
    for child in children:
        seconds, _, text = child.communicate()[0].strip().partition(" ")
        took.append(float(seconds))
        said[text] += 1
    print(
        f"{processes} processes on {len(os.sched_getaffinity(0))} CPUs, {busy} others computing, a "
        f"hanging compiler, a limit of {limit:g} s: the first to end took {min(took):.1f} s, the "
        f"last {max(took):.1f} s. Starting them and loading another op took {ready:.1f} s before."
    )
    print("  each: " + " ".join(f"{each:.1f}" for each in sorted(took)))
    for line, count in said.most_common():
        print(f"  {count} said: {line}")
    return 0


if __name__ == "__main__":
    numbers = [float(each) for each in sys.argv[1:]]
    given = dict(enumerate(numbers))
    sys.exit(main(int(given.get(0, 64)), given.get(1, 6.0), int(given.get(2, 0))))
