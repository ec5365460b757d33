"""Writes a file in one step: a reader sees the old file, or all of the new one.

A full disk leaves the old file and nothing else. So does a kill, except that a temporary file may
stay beside it. (In the store, gc removes those.)
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress

from opkiln.trust import make_private

FULL = (errno.ENOSPC, errno.EDQUOT)  # what an OSError says of a full disk


def write_private(path: str, data: bytes) -> None:
    """Write a file for this user alone. Its directory is made. Raises OSError."""
    make_private(os.path.dirname(path))
    _write(path, data, 0o600)


def replace(path: str, data: bytes) -> None:
    """Write a file of the user's. A file that is there keeps its mode, and a link that leads to it
    stays a link. Raises OSError."""
    path = os.path.realpath(path)
    _write(path, data, 0o666, like=path if os.path.exists(path) else "")


def is_temporary(path: str) -> bool:
    """Whether a file has the name that one has here until all of it is written."""
    return re.search(r"\.[0-9]+-[0-9a-f]{12}$", path) is not None


def _write(path: str, data: bytes, mode: int, like: str = "") -> None:
    temporary = f"{path}.{os.getpid()}-{os.urandom(6).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        if like:
            shutil.copymode(like, temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
