"""``make test-sycl``: make an environment with Intel's SYCL runtime (3 GB) and run the tests in it.

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

REQUIREMENTS = (
    "intel-sycl-rt>=2026",
    "intel-opencl-rt>=2026",
    "numpy",
    "pytest>=8.3",
    "hypothesis>=6.100",
)


def main() -> int:
    """The exit status of the tests; 0 where the packages cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".sycl-venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is to install")
    arguments, pytest = parser.parse_known_args()
    reason = ready(
        arguments.venv, (arguments.torch,), REQUIREMENTS, ("--editable", str(REPOSITORY))
    )
    if reason:
        print(f"test-sycl: skipped: {reason}", file=sys.stderr)
        return 0
    # By its own path: the packages are found through the interpreter's prefix.
    python = os.path.join(os.path.abspath(arguments.venv), "bin", "python")
    command = [python, "-m", "pytest", str(HERE), *pytest]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
