"""Many processes that load an op whose compiler hangs: when does each of them end?

    python bench/waiters.py [PROCESSES] [SECONDS]

Prints how long each process ran, from its own start to its end, and what it said. SECONDS (6) is
``OPKILN_BUILD_TIMEOUT``. On a quiet machine all of 64 end within 2 seconds of the limit.
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
import sys, opkiln
opkiln.load("op", [sys.argv[1]], is_python_module=False, abi="none")
"""
_COMPILER = """#!/bin/sh
case "$*" in *' -c '*op.cpp*) sleep 600;; esac
exec {real} "$@"
"""


def main(processes: int, limit: float) -> int:
    with tempfile.TemporaryDirectory(prefix="opkiln-waiters-") as name:
        return _measure(Path(name), processes, limit)


def _measure(base: Path, processes: int, limit: float) -> int:
    compiler = base / "g++"
    compiler.write_text(_COMPILER.format(real=shutil.which("g++")))
    compiler.chmod(0o755)
    for name in ("warm", "op"):
        (base / f"{name}.cpp").write_text('extern "C" int value() { return 1; }\n')
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "OPKILN_CACHE_DIR": str(base / "cache"),
        "OPKILN_RUNTIME_DIR": str(base / "run"),
        "OPKILN_BUILD_TIMEOUT": f"{limit:g}",
    }
    time.sleep(2.1)  # what is remembered of a program that was just made is not believed
    # The first load asks the compiler what it is. That is not what is measured here.
    command = [sys.executable, "-c", _LOAD]
    subprocess.run([*command, str(base / "warm.cpp")], env=environment, check=True)
    started: dict[int, float] = {}
    children = {}
    for _ in range(processes):
        child = subprocess.Popen(
            [*command, str(base / "op.cpp")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started[child.pid], children[child.pid] = time.monotonic(), child
    took: list[float] = []
    said: Counter[str] = Counter()
    while children:
        pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
        took.append(time.monotonic() - started[pid])
        _, text = children.pop(pid).communicate()
        lines = [line for line in text.splitlines() if line.startswith("opkiln.errors.")]
        said[lines[-1] if lines else text[-200:]] += 1
    print(
        f"{processes} processes, a hanging compiler, a limit of {limit:g} s: "
        f"the first to end ran {took[0]:.1f} s, the longest {max(took):.1f} s"
    )
    print("  each: " + " ".join(f"{each:.1f}" for each in took))
    for line, count in said.most_common():
        print(f"  {count} said: {line}")
    return 0


if __name__ == "__main__":
    numbers = [float(each) for each in sys.argv[1:]]
    sys.exit(main(int(numbers[0]) if numbers else 64, numbers[1] if numbers[1:] else 6.0))
