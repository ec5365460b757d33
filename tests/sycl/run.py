"""``make test-sycl``: make an environment with Intel's SYCL runtime (3 GB) and run the tests in it.

The environment is made once: as long as what it is made of stays the same, nothing is installed.
Where the packages cannot be had, that is said with the reason, and nothing is run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
REQUIREMENTS = ("intel-sycl-rt>=2026", "intel-opencl-rt>=2026", "numpy", "pytest>=8.3")


def main() -> int:
    """The exit status of the tests; 0 where the packages cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".sycl-venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is to install")
    arguments, pytest = parser.parse_known_args()
    reason = ready(arguments.venv, arguments.torch)
    if reason:
        print(f"test-sycl: skipped: {reason}", file=sys.stderr)
        return 0
    # By its own path: the packages are found through the interpreter's prefix.
    python = os.path.join(os.path.abspath(arguments.venv), "bin", "python")
    command = [python, "-m", "pytest", str(HERE), *pytest]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


def ready(venv: Path, torch: str) -> str:
    """Make the environment, unless it is there; why it cannot be made, or nothing."""
    stamp = venv / ".ready"
    wanted = "\n".join((sys.version, str(REPOSITORY), torch, *REQUIREMENTS))
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    # torch by itself and first, so that nothing else chooses one.
    for packages in ((torch,), REQUIREMENTS, ("--editable", str(REPOSITORY))):
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            last = errors[-1] if errors else f"pip exits with {done.returncode}"
            return f"{' '.join(packages)} cannot be installed: {last}"
    stamp.write_text(wanted)
    return ""


if __name__ == "__main__":
    sys.exit(main())
