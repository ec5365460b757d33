"""Directories that are gone with the process that made them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def directory(prefix: str, parent: str | None = None) -> Path:
    """A new directory. It is removed at the end of this process, not of one forked from it."""
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(made: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(made, ignore_errors=True)
