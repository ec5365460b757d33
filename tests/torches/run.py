"""``make test-torches``: one wheel of prebuilt ops, loaded and called on several torches.

The wheel is built once, with the torch of the interpreter that runs this. Each other torch gets an
environment of its own, in which nothing may compile. A torch that cannot be installed is named with
the reason; CUDA's builds of torch take gigabytes, and need no GPU for this.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from environments import REPOSITORY, ready  # noqa: E402 (found by the line above)

CHECKS = HERE.parent / "gpu" / "prebuilt.py"
TARGETS = ("cpu:x86-64-v2,x86-64-v3,x86-64-v4", "cuda:9.0")


def main() -> int:
    """0 when the wheel served on every torch that could be installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torches", nargs="*", default=["2.10.0", "2.14.1"], help="versions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        unpacked = _wheel(Path(directory))
        worst = _check(sys.executable, unpacked)
        for version in arguments.torches:
            venv = REPOSITORY / f".torch-{version}-venv"
            packages = ((f"torch=={version}", "numpy"), ("--editable", str(REPOSITORY)))
            if reason := ready(venv, *packages):
                print(f"test-torches: skipped: {reason}", file=sys.stderr)
            else:
                worst = max(worst, _check(str(venv / "bin" / "python"), unpacked))
    return worst


def _wheel(directory: Path) -> Path:
    """Build the wheel, and unpack it as an installer would."""
    targets = [part for target in TARGETS for part in ("--target", target)]
    build = [sys.executable, "-m", "opkiln", "build", "--all", *targets]
    subprocess.run([*build, "--wheel", str(directory), "--verify"], check=True)
    (wheel,) = directory.glob("*.whl")
    print(wheel.name, flush=True)
    unpacked = directory / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(unpacked), str(wheel)], check=True)
    return unpacked


def _check(python: str, unpacked: Path) -> int:
    return subprocess.run(
        [python, str(CHECKS), "served", str(unpacked)], cwd=REPOSITORY, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
