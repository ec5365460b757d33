"""Make the bench environment: ``python bench/setup.py`` gives ``.bench-venv`` with the peers.

Each requirement is installed by itself, and one that cannot be had does not stop the others:
``bench/run.py`` then shows that peer with the reason instead of a figure. torch goes first, and
DeepSpeed is built without isolation, so that it finds that torch instead of fetching its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent


def requirements() -> list[str]:
    """The lines of requirements.txt that name a package, in order."""
    lines = (line.partition("#")[0].strip() for line in (HERE / "requirements.txt").open())
    return [line for line in lines if line]


def install(python: Path, *what: str) -> bool:
    """Whether ``pip install`` of one requirement worked; pip itself says why not."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-build-isolation", *what]
    # DS_BUILD_OPS=0: DeepSpeed would otherwise compile its ops while it is installed, and the
    # bench could no longer time its first use.
    environment = {**os.environ, "DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(command, env=environment, check=False).returncode == 0


def main() -> int:
    """Create or complete the environment; 1 when torch or opkiln itself could not be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".bench-venv")
    venv = parser.parse_args().venv
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    missing = [line for line in requirements() if not install(python, line)]
    if not install(python, "--no-deps", "--editable", str(REPOSITORY)):
        missing.append("opkiln")
    for line in missing:
        print(f"bench: could not install {line}", file=sys.stderr)
    essential = {"opkiln", requirements()[0]}
    print(f"bench: the environment is {os.path.relpath(venv)}")
    return 1 if essential.intersection(missing) else 0


if __name__ == "__main__":
    sys.exit(main())
