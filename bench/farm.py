"""The build farm: two workers of one slot each, over one.

    python bench/farm.py                                  # g++ alone, no torch; some four minutes
    python bench/farm.py --out bench/results/farm.json

`opkiln build --executor farms:processes -j 1` with a pool of one process and of two take turns,
each with an empty store. The tasks are eight small packages for two CPU levels, of one C++ source
each: their compiles take about the same time, some seconds. The time is that of the whole command:
asking the compilers, starting the workers, and taking in their results are in it. All runs must
write the same bundle.
The bar is 1.6 on the medians. It needs two quiet cores: the load average says how quiet they were.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import machine

BAR = 1.6
WORKERS = (1, 2)
TARGETS = "cpu:x86-64-v2,x86-64-v3"
# Templates of the standard library: seconds of the compiler's time, and little to read or link.
SOURCE = """\
#include <regex>
#include <string>
extern "C" int answer(const char* text) {
  static const std::regex pattern("(a|b)*c{NUMBER}|[d-f]+(?:g|h)?");
  std::cmatch found;
  return std::regex_match(text, found, pattern) ? static_cast<int>(found.length(0)) : -1;
}
"""
DECLARATION = """\
from opkiln.builder import OpBuilder


class Builder(OpBuilder):
    NAME, KIND, ABI = "{name}", "plain", "none"

    def sources(self):
        return ["op.cpp"]
"""
FARMS = """\
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def processes():
    return ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"))
"""


def offer(site: Path, number: int) -> str:
    """An installed package with one op; its name."""
    name = f"farm_bench_{number}"
    package, metadata = site / name, site / f"{name}-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / "op.py").write_text(DECLARATION.format(name=name))
    (package / "op.cpp").write_text(SOURCE.replace("NUMBER", str(number + 1)))
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[opkiln.ops]\n{name} = {name}.op:Builder\n")
    return name


def build(base: Path, ops: list[str], workers: int, run: int) -> tuple[float, str]:
    """(seconds, the bundle's SHA-256) of one command with an empty store."""
    place = base / f"{workers}-{run}"
    place.mkdir(mode=0o700)
    kept = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | {
        "PYTHONPATH": f"{base / 'site'}:{place}",
        "OPKILN_CACHE_DIR": str(place / "store"),
        "OPKILN_RUNTIME_DIR": str(place / "run"),
        "OPKILN_PROGRESS": "off",
    }
    (place / "farms.py").write_text(FARMS.replace("WORKERS", str(workers)))
    bundle = place / "ops.bundle"
    command = [sys.executable, "-m", "opkiln", "build", *ops, "--target", TARGETS, "--executor",
               "farms:processes", "-j", "1", "--bundle", str(bundle)]  # fmt: skip
    began = time.monotonic()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began, hashlib.sha256(bundle.read_bytes()).hexdigest()


def main() -> int:
    """Measure, print, store; 1 when the bar was missed or the bundles differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", type=int, default=8, help="packages; each has two tasks")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--out", type=Path, help="write the results here")
    asked = parser.parse_args()
    head = machine.described()
    before = machine.load_average()
    seconds: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    bundles: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="opkiln-bench-") as directory:
        base = Path(directory)
        ops = [offer(base / "site", number) for number in range(asked.ops)]
        time.sleep(2.1)  # files that changed just now are hashed each time
        for run in range(asked.repeats):
            for workers in WORKERS:
                taken, bundle = build(base, ops, workers, run)
                seconds[workers].append(taken)
                bundles.add(bundle)
                print(f"{workers} worker{'s' * (workers > 1)}: {taken:.1f} s", flush=True)
    one, two = (median(seconds[workers]) for workers in WORKERS)
    head["load_average"] = {"before": before, "after": machine.load_average()}
    result = {
        "tasks": 2 * asked.ops,
        "seconds": {str(workers): each for workers, each in seconds.items()},
        "ratio": one / two,
        "bar": {"limit": BAR, "met": one / two >= BAR},
        "same_bundle": len(bundles) == 1,
    }
    print(machine.heading(head))
    print("load average before {before:.2f}, after {after:.2f}".format(**head["load_average"]))
    print(f"{2 * asked.ops} tasks: one worker {one:.1f} s, two {two:.1f} s, ratio {one / two:.2f} "
          f"(bar {BAR}); {len(bundles)} bundle{'s' * (len(bundles) > 1)}")  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps({**head, **result}, indent=1) + "\n")
    return 0 if result["bar"]["met"] and result["same_bundle"] else 1


if __name__ == "__main__":
    sys.exit(main())
