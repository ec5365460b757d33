"""``make test-torches``: one wheel of prebuilt ops, and one library of op.h, loaded and called on
several torches.

The wheel and the library are built once, with the torch of the interpreter that runs this. Each
other torch gets an environment of its own, in which nothing may compile. A torch that cannot be
installed is named with the reason; CUDA's builds of torch take gigabytes, and need no GPU for this.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from environments import REPOSITORY, ready  # noqa: E402 (found by the line above)

LIGHT = HERE / "light.py"
CHECKS = HERE.parent / "gpu" / "prebuilt.py"
TARGETS = ("cpu:x86-64-v2,x86-64-v3,x86-64-v4", "cuda:9.0")


def main() -> int:
    """0 when the wheel served on every torch that could be installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torches", nargs="*", default=["2.10.0", "2.14.1"], help="versions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        unpacked = _wheel(Path(directory))
        library = _light(Path(directory))
        worst = _check(sys.executable, unpacked, library)
        for version in arguments.torches:
            venv = REPOSITORY / f".torch-{version}-venv"
            packages = ((f"torch=={version}", "numpy"), ("--editable", str(REPOSITORY)))
            if reason := ready(venv, *packages):
                print(f"test-torches: skipped: {reason}", file=sys.stderr)
            else:
                worst = max(worst, _check(str(venv / "bin" / "python"), unpacked, library))
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


def _light(directory: Path) -> str:
    """Build the library of the sample package ``light``; its path."""
    environment = {**os.environ, "OPKILN_CACHE_DIR": str(directory / "cache")}
    command = [sys.executable, str(LIGHT), "build"]
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def _check(python: str, unpacked: Path, library: str) -> int:
    checks = [[python, str(CHECKS), "served", str(unpacked)], [python, str(LIGHT), "run", library]]
    return max(subprocess.run(each, cwd=REPOSITORY, check=False).returncode for each in checks)


if __name__ == "__main__":
    sys.exit(main())
