"""``make test-sanitize``: the tests of native code under AddressSanitizer and UBSan.

Every op is built with them, and so are the CUDA kernels as they are compiled for the CPU. First
comes a check that they see anything: an op that writes past its tensor must end the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from sample import sanitizers  # noqa: E402 (found by the line above)

SEEN = 66  # the exit code of a process that a sanitizer ended

FAULTS = {
    "a write past an allocation": ("p[7 + n] = 1;", "heap-buffer-overflow"),
    "a read of freed memory": ("free(p); n += p[0];", "heap-use-after-free"),
    "an overflow of a signed number": ("p[0] = 2147483647; p[0] += n;", "signed integer overflow"),
}
FAULTY = """
#include <cstdlib>
extern "C" int go(int n) {
  volatile int* q = static_cast<volatile int*>(malloc((7 + n) * sizeof(int)));
  int* p = const_cast<int*>(q);
  %s
  return q[0] + n;
}
"""
CALL = """
import sys, opkiln
opkiln.load("faulty", [sys.argv[1]], is_python_module=False, abi="none").go(1)
"""


def main() -> int:
    """pytest's exit code; 1 where the sanitizers are not at work."""
    environment = _environment()
    with tempfile.TemporaryDirectory() as directory:
        for what, (code, told) in FAULTS.items():
            if (problem := _unseen(Path(directory), environment, code, told)) is not None:
                print(f"test-sanitize: {what} goes unseen: {problem}", file=sys.stderr)
                return 1
            print(f"test-sanitize: {what} is seen", flush=True)
    chosen = sys.argv[1:] or ["tests/ops", "-m", "not full"]
    # A process that a sanitizer ends says nothing more. So the test's name must be on the terminal
    # by then, and the report, which comes from neither Python nor pytest, must go there.
    environment["PYTHONUNBUFFERED"] = "1"
    command = [sys.executable, "-m", "pytest", "--sanitize", "-vv", "--capture=sys", *chosen]
    return subprocess.run(command, cwd=TESTS.parent, env=environment, check=False).returncode


def _environment() -> dict[str, str]:
    """With the runtimes preloaded, and libstdc++: ASan looks for what throws when it starts."""
    wanted = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in wanted
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(found),
        # Python and torch keep what they allocate until the end. The child that tries whether a
        # library loads has no LD_PRELOAD: it gets the runtime by the library's own needs, late.
        "ASAN_OPTIONS": f"detect_leaks=0:verify_asan_link_order=0:exitcode={SEEN}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={SEEN}",
    }


def _unseen(directory: Path, environment: dict[str, str], code: str, told: str) -> str | None:
    """Why a fault was not seen; None when it was."""
    source = directory / "faulty.cpp"
    source.write_text(FAULTY % code)
    sanitizers.switch_on()
    given = {**environment, **sanitizers.variables(), "OPKILN_CACHE_DIR": str(directory / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(source)], env=given, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode == SEEN and told in done.stderr:
        return None
    return f"exit {done.returncode}, {done.stderr[-2000:]}"


if __name__ == "__main__":
    sys.exit(main())
