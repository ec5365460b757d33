"""What observing costs: cold builds of ops with the observer and without, taking turns.

    python bench/observer.py [--repeats N] [--out bench/results/observer.json] [OP[:TARGET] ...]

Each build runs in a fresh process with a store that has nothing but what is remembered of the
compilers, and the observer's library, which is compiled once per host. A build without it is one in
which the process finds no observer. Turns alternate which of the two goes first. The CPU time is
that of the process and of all that it started; on a busy machine it is the steadier figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

BAR = 1.02
OPS = ("packbits:cpu", "cpu_adam:cpu", "fused_adam:cuda:9.0")

_BUILD = """
import resource, sys, time
from opkiln.building.observing import observer
if sys.argv[1] == "without":
    observer.library = lambda *given: ""
from opkiln.__main__ import main
began = time.monotonic()
op, _, target = sys.argv[2].partition(":")
sys.argv = ["opkiln", "build", "--quiet", op, *(["--target", target] if target else [])]
try:
    status = main()
except SystemExit as ended:
    status = ended.code
if status:
    sys.exit(f"{op} was not built")
took = time.monotonic() - began
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print("\\ntook", took, sum(each.ru_utime + each.ru_stime for each in used))
"""


def _build(op: str, how: str, cache: Path) -> tuple[float, float]:
    """The seconds and the CPU seconds of one build."""
    environment = {
        **os.environ,
        "OPKILN_CACHE_DIR": str(cache),
        "OPKILN_RUNTIME_DIR": str(cache.parent / "run"),
        "OPKILN_PROGRESS": "off",
    }
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, how, op],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{op}, {how} the observer:\n{done.stdout}\n{done.stderr}")
    wall, cpu = done.stdout.rpartition("took ")[2].split()
    return float(wall), float(cpu)


def _measure(op: str, repeats: int, base: Path) -> dict[str, Any]:
    asked = base / "asked"  # a store that knows the compilers, and has the observer
    _build(op, "with", asked)
    for name in ("ops", "objects", "receipts"):
        for place in asked.glob(f"v*/{name}"):
            shutil.rmtree(place)
    taken: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for turn in range(repeats):
        for how in sorted(taken, reverse=bool(turn % 2)):
            cache = base / "cache"
            shutil.copytree(asked, cache)
            taken[how].append(_build(op, how, cache))
            shutil.rmtree(cache)
    shutil.rmtree(asked)
    row: dict[str, Any] = {"op": op}
    for place, figure in enumerate(("wall", "cpu")):
        with_, without = ([each[place] for each in taken[how]] for how in ("with", "without"))
        row[f"{figure}_with_s"] = [round(each, 2) for each in with_]
        row[f"{figure}_without_s"] = [round(each, 2) for each in without]
        row[f"{figure}_ratio"] = round(statistics.median(with_) / statistics.median(without), 3)
    row |= {"bar": BAR, "met": row["cpu_ratio"] <= BAR}
    print(f"{op}: CPU time {row['cpu_ratio']}, wall {row['wall_ratio']}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ops", nargs="*", default=OPS, metavar="OP[:TARGET]")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = machine.described()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="opkiln-observer-") as name:
        base = Path(name)
        rows = [_measure(op, given.repeats, base) for op in given.ops]
    result["load_average"] = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)}
    result["rows"] = rows
    print(machine.heading(result))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
