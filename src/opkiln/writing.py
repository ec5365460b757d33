"""Writes a file in one step: a reader sees the old file, or all of the new one.

A full disk leaves the old file and nothing else. So does a kill, except that a hidden file may stay
beside it, ``.NAME.PID-…``. (In the store, gc removes those.)
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import contextmanager, suppress

from opkiln.trust import make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT)  # what an OSError says of a full disk


def write_private(path: str, data: bytes) -> None:
    """Write a file for this user alone. Its directory is made. Raises OSError."""
    make_private(os.path.dirname(path))
    with taking_the_place_of(path, 0o600) as file:
        file.write(data)


def replace(path: str, data: bytes) -> None:
    """Write a file of the user's. A file that is there keeps its mode, and a link that leads to it
    stays a link. Raises OSError."""
    path = os.path.realpath(path)
    with taking_the_place_of(path) as file:
        file.write(data)
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))


def is_temporary(path: str) -> bool:
    """Whether a file has the name that one has here until all of it is written."""
    return re.search(r"\.[0-9]+-[0-9a-f]{12}$", path) is not None


@contextmanager
def taking_the_place_of(path: str, mode: int = 0o666, *, sync: bool = False) -> Iterator[BinaryIO]:
    """A new file, which is ``path`` when the block ends; with ``sync``, once it is on the disk.

    After an error in the block, or a full disk, ``path`` is as before. Raises OSError.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{os.getpid()}-{os.urandom(6).hex()}")
    try:
        with open(temporary, "x+b", opener=lambda name, how: os.open(name, how, mode)) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
