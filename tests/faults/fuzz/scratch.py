"""A directory for files that a parser wants by path: in memory, gone with the process."""

from __future__ import annotations

import os
from functools import cache

from sample import temporary


@cache
def directory() -> str:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return str(temporary.directory("opkiln-fuzz-", shared))


def file(name: str, data: bytes) -> str:
    """Write a file, and return its path."""
    path = os.path.join(directory(), name)
    with open(path, "wb") as out:
        out.write(data)
    return path
