"""How the steps of ``make release-check`` run programs, and how they fail."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# Of the surroundings of whoever runs this, a user's environment must not depend on them.
DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SOURCE_DATE_EPOCH")
PATIENCE = 1800


class Failure(Exception):
    """Something that must not be released; the text says what."""


class Tools(NamedTuple):
    """The programs of the dependency group ``release``."""

    directory: Path

    def program(self, name: str) -> str:
        return str(self.directory / name)

    def python(self, *arguments: object) -> list[str]:
        return [self.program("python"), *map(str, arguments)]


def say(text: str) -> None:
    sys.stdout.write(f"release-check: {text}\n")
    sys.stdout.flush()


def run(argv: list[str], cwd: Path, *, expected: int = 0, umask: int = -1, **variables: str) -> str:
    """What a command prints, both streams in one. Raises Failure if it exits otherwise."""
    environment = {k: v for k, v in os.environ.items() if k not in DROPPED}
    environment = {k: v for k, v in environment.items() if not k.startswith("OPKILN_")}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "NO_COLOR": "1", **variables}
    done = subprocess.run(
        argv, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, errors="replace", umask=umask, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    if done.returncode != expected:
        raise Failure(
            f"{shlex.join(argv)} exits with {done.returncode}, expected {expected}\n{done.stdout}"
        )
    return done.stdout
