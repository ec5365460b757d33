"""A directory for files that a parser wants by path: in memory, gone with the process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache


@cache
def directory() -> str:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    made = tempfile.mkdtemp(prefix="opkiln-fuzz-", dir=shared)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def file(name: str, data: bytes) -> str:
    """Write a file, and return its path."""
    path = os.path.join(directory(), name)
    with open(path, "wb") as out:
        out.write(data)
    return path
