"""Sealed files in memory, for ``dlopen``: verified bytes that can no longer be changed.

A file on disk could be replaced between the check and the ``dlopen``. And there may be no place to
write a file.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from typing import BinaryIO

from opkiln.base.digest import sha256_file

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

_kept: dict[str, str] = {}  # SHA-256 -> path; the descriptors stay open until the process ends
_last = 2  # the highest descriptor that was used for a sealed file


class Changed(ValueError):
    """The written bytes do not have the expected digest. The message is their digest."""


# The paths contain the parent's pid, and the parent may end before the child opens them.
os.register_at_fork(after_in_child=_kept.clear)


def keep(name: str, sha256: str, fill: Callable[[BinaryIO], None]) -> str:
    """Let ``fill`` write to a sealed file in memory, and return a path to open it by. This process
    and its children can open the path as long as this process lives. A file that has this digest
    already is reused. Raises Changed, OSError, and what ``fill`` raises."""
    known = _kept.get(sha256)
    if known is None or not _is_intact(known, sha256):
        known = _kept[sha256] = _new(name, sha256, fill)
    return known


def copy(path: str, sha256: str) -> str:
    """A new file in memory with the bytes of a verified file, which no other code opens. Raises
    Changed, OSError."""

    def fill(out: BinaryIO) -> None:
        with open(path, "rb") as file:
            shutil.copyfileobj(file, out, 1 << 20)

    return _new(os.path.basename(path), sha256, fill)


def _new(name: str, sha256: str, fill: Callable[[BinaryIO], None]) -> str:
    global _last
    first = os.memfd_create("opkiln-" + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(first, "wb", closefd=False) as out:
            fill(out)
        # Seal before hashing: until it is sealed, another process of this user could write to it.
        fcntl.fcntl(first, fcntl.F_ADD_SEALS, _SEALS)
        os.lseek(first, 0, os.SEEK_SET)
        if (found := sha256_file(first)) != sha256:
            raise Changed(found)
        # The dynamic linker identifies a library by its path, which contains the descriptor. If
        # somebody closed every descriptor and we used a number again, the linker would return the
        # library that had that number before. So each file gets a higher number.
        fd = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, _last + 1)
    finally:
        os.close(first)
    _last = fd
    return f"/proc/{os.readlink('/proc/self')}/fd/{fd}"


def _is_intact(path: str, sha256: str) -> bool:
    try:
        return sha256_file(path) == sha256
    except OSError:
        return False  # the descriptor was closed: daemons close all of theirs
