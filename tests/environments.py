"""Environments that tests make beside the project's own, each once: with another torch, or more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def ready(venv: Path, *wanted: tuple[str, ...]) -> str:
    """Make an environment of these packages, unless it is there; why it cannot be, or nothing.

    Each tuple is installed by itself, in this order: torch comes first, so that nothing else
    chooses one. As long as what it is made of stays the same, nothing is installed.
    """
    stamp = venv / ".ready"
    made_of = "\n".join((sys.version, str(REPOSITORY), *map(repr, wanted)))
    if stamp.exists() and stamp.read_text() == made_of:
        return ""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    for packages in wanted:
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            last = errors[-1] if errors else f"pip exits with {done.returncode}"
            return f"{' '.join(packages)} cannot be installed: {last}"
    stamp.write_text(made_of)
    return ""
