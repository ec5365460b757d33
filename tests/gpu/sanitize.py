"""The kernels under compute-sanitizer, on this machine's GPU.

    python tests/gpu/sanitize.py [--out FILE]

``memcheck`` sees accesses outside of an allocation, ``racecheck`` two threads that use one place in
shared memory without a barrier between them. Both run on checks of the scripts beside this, with an
allocation of its own for each tensor. First they must see what is planted for them. It takes a few
minutes. Left out are the checks of billions of elements and of thousands of allocations, which take
hours so, and those that capture graphs, in which nothing can be allocated without torch's pools.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SEEN = 66  # the exit code of a run that a tool has something to say of
SECONDS = 300
AT_ONCE = 8  # they wait for the host most of the time

PLANTED = """
import ctypes, opkiln, pathlib, sys, tempfile
source = pathlib.Path(tempfile.mkdtemp()) / "planted.cu"
source.write_text('''
__global__ void outside(float* x) { x[threadIdx.x] = 1; }
__global__ void racing(float* x) {
  __shared__ float places[64];
  places[threadIdx.x] = x[threadIdx.x % 32];
  x[threadIdx.x % 32] = places[63 - threadIdx.x];
}
extern "C" int go(int which) {
  float* x = nullptr;
  if (cudaMalloc(&x, 32 * sizeof(float))) return 1;
  if (which == 0) outside<<<1, 64>>>(x); else racing<<<1, 64>>>(x);
  return cudaDeviceSynchronize();
}
''')
lib = opkiln.load("planted", [str(source)], is_python_module=False, abi="none")
lib.go(["memcheck", "racecheck"].index(sys.argv[1]))
"""


class Case(NamedTuple):
    """Some checks of a script, by a word of their names, under a tool."""

    tool: str
    script: str
    word: str


CASES = (
    Case("memcheck", "fused_adam", "ten thousand views"),
    Case("memcheck", "fused_adam", "odd addresses"),
    Case("memcheck", "fused_lion", "odd addresses"),
    Case("memcheck", "fused_lamb", "odd addresses"),
    Case("memcheck", "quantizer", "odd addresses"),
    Case("memcheck", "quantizer", "swizzled"),
    Case("memcheck", "deepspeed_quantizer", "odd addresses"),
    Case("memcheck", "deepspeed_quantizer", "sums of parts"),
    Case("memcheck", "fp_quantizer", "odd addresses"),
    Case("memcheck", "fp_quantizer", "rows are"),
    Case("memcheck", "packbits", "every size"),
    Case("racecheck", "fused_lamb", "odd addresses"),
    Case("racecheck", "quantizer", "swizzled"),
    Case("racecheck", "deepspeed_quantizer", "swizzled"),
    Case("racecheck", "fp_quantizer", "odd addresses"),
)


def main() -> int:
    """0 when the planted faults are seen, and nothing else is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--only", metavar="SCRIPT", default="", help="checks of this script")
    options = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("FAIL there is no compute-sanitizer here")
        return 1
    results = [_planted(tool) for tool in ("memcheck", "racecheck")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results += pool.map(_clean, [case for case in CASES if options.only in case.script])
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    failed = sum(not result["passed"] for result in results)
    print(f"{'FAIL' if failed else 'PASS'}: {failed} failed")
    return 1 if failed else 0


def _run(tool: str, *arguments: str) -> tuple[int, str, float]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(SEEN), sys.executable]
    # Of torch's pools a tool sees only the whole; past the end of a tensor lies the next.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, env=environment,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"took more than {SECONDS} s", SECONDS
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def _planted(tool: str) -> dict[str, object]:
    code, said, seconds = _run(tool, "-c", PLANTED, tool)
    return _told(tool, "a planted fault is seen", code == SEEN, said, seconds)


def _clean(case: Case) -> dict[str, object]:
    arguments = (str(HERE / f"{case.script}.py"), "--only", case.word)
    code, said, seconds = _run(case.tool, *arguments)
    passed = code == 0 and "\nPASS " in said
    return _told(case.tool, f"{case.script}, checks with '{case.word}'", passed, said, seconds)


def _told(tool: str, what: str, passed: bool, said: str, seconds: float) -> dict[str, object]:
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", said)
    found = summary[-1] if summary else "no summary"
    print(f"{'PASS' if passed else 'FAIL'} {tool}: {what}: {found}, {seconds:.0f} s", flush=True)
    if not passed:
        print(said[-3000:], flush=True)
    return {"tool": tool, "what": what, "passed": passed, "found": found, "seconds": round(seconds)}


if __name__ == "__main__":
    sys.exit(main())
