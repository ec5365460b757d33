"""Verified bytes that nobody can change any more: files in memory, sealed, for ``dlopen``.

A file on disk that was checked could be replaced before it is opened, and there may be nowhere to
write one.
"""

from __future__ import annotations

import fcntl
import os

from opkiln.digest import sha256_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

_kept: dict[str, str] = {}  # SHA-256 -> path; the descriptors stay open as long as the process
_last = 2  # the highest descriptor that was used so


class Changed(ValueError):
    """What was written has another digest than was asked for; the text is that digest."""


def _after_fork() -> None:
    # The paths name the parent, which may end before its child opens them.
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork)


def keep(name: str, sha256: str, fill: Callable[[int], None]) -> str:
    """A path under which what ``fill`` writes to a descriptor can be opened, by this process and
    by its children, as long as this process lives. One that has this digest already is used again.

    Raises Changed, OSError, and what ``fill`` raises.
    """
    global _last
    known = _kept.get(sha256)
    if known is not None and _still(known, sha256):
        return known
    first = os.memfd_create("opkiln-" + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fill(first)
        # Sealed first, digested then: until then another process of this user could write to it.
        fcntl.fcntl(first, fcntl.F_ADD_SEALS, _SEALS)
        os.lseek(first, 0, os.SEEK_SET)
        if (found := sha256_file(first)) != sha256:
            raise Changed(found)
        # The dynamic linker knows a library by its path: a number that comes back, after somebody
        # closed every descriptor, would be taken for the library that had it first.
        fd = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, _last + 1)
    finally:
        os.close(first)
    _last = fd
    path = f"/proc/{os.readlink('/proc/self')}/fd/{fd}"
    _kept[sha256] = path
    return path


def _still(path: str, sha256: str) -> bool:
    try:
        return sha256_file(path) == sha256
    except OSError:
        return False  # somebody closed the descriptor, as daemons close all of theirs
