"""``make test-deepspeed``: make an environment with DeepSpeed from PyPI, and run its tests in it.

Where the packages cannot be had, that is said with the reason, and nothing is run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from environments import REPOSITORY, ready  # noqa: E402 (found by the line above)

# Without isolation: DeepSpeed is to find the torch that is there, and not to fetch its own.
BEFORE = ("numpy", "setuptools", "wheel", "ninja", "pytest>=8.3", "hypothesis>=6.100", "click")
DEEPSPEED = ("--no-build-isolation", "deepspeed==0.19.8")
TESTS = REPOSITORY / "tests" / "build"


def main() -> int:
    """The exit status of the tests; 0 where the packages cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".deepspeed-venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is to install")
    arguments, pytest = parser.parse_known_args()
    # setup.py would compile DeepSpeed's ops otherwise, which is what the tests are about.
    os.environ["DS_BUILD_OPS"] = "0"
    reason = ready(
        arguments.venv, (arguments.torch,), BEFORE, DEEPSPEED, ("--editable", str(REPOSITORY))
    )
    if reason:
        print(f"test-deepspeed: skipped: {reason}", file=sys.stderr)
        return 0
    del os.environ["DS_BUILD_OPS"]
    python = os.path.join(os.path.abspath(arguments.venv), "bin", "python")
    files = sorted(str(path) for path in TESTS.glob("test_compat_deepspeed*.py"))
    command = [python, "-m", "pytest", "-rs", *files, *pytest]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
