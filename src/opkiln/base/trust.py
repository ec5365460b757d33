"""Decides whether a file or directory is trusted, by its owner and mode.

A file is trusted if it belongs to us or to root, and nobody else can write to it. A layer that the
user listed in ``OPKILN_STORE_LAYERS`` is trusted for any owner, unless everybody can write to it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from opkiln.base import forks


def fault(path: str, found: os.stat_result, *, listed: bool = False) -> str:
    """Why this file or directory is not trusted; empty if it is."""
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link"
    if listed:
        return f"{path} is writable by everybody" if found.st_mode & 0o002 else ""
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to uid {found.st_uid}, not to uid {os.getuid()} or root"
    if found.st_mode & 0o022:
        return f"{path} is writable by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def follow_link(path: str) -> str:
    """The target of a symbolic link that this user or root made. Any other path is returned
    unchanged."""
    try:
        found = os.lstat(path)
    except OSError:
        return path
    ours = stat.S_ISLNK(found.st_mode) and found.st_uid in (os.getuid(), 0)
    return os.path.realpath(path) if ours else path


def open_to_all(root: str, base: str) -> str:
    """Why a listed layer is not trusted: everybody may write to a directory on the path to
    ``base``. Empty if it is trusted."""
    path = os.path.dirname(root)  # what the user listed; it may be a symbolic link
    try:
        if reason := fault(path, os.stat(path), listed=True):
            return reason
        for part in os.path.relpath(base, path).split("/"):
            path = os.path.join(path, part)
            if reason := fault(path, os.lstat(path), listed=True):
                return reason
    except OSError:
        return ""  # the layer has no such directory
    return ""


def claim(root: str) -> str:
    """Create a store's directory and its parent, for this user only.

    Returns why they must not be written to; empty if they are ours. Raises OSError.

    They may be in a place where everybody can create files (/tmp). So the opened directories are
    checked, not their names, and no link is followed. Once the parent is ours, nobody else can
    replace the directory in it.
    """
    place, name = os.path.split(root)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    make_private(os.path.dirname(place))
    outer = inner = -1
    try:
        _make(place)
        outer = os.open(place, flags)
        if reason := fault(place, os.fstat(outer)):
            return reason
        _make(name, outer)
        inner = os.open(name, flags, dir_fd=outer)
        return fault(root, os.fstat(inner))
    except OSError:
        for path in (place, root):
            if os.path.islink(path):
                return fault(path, os.lstat(path))
        raise
    finally:
        for fd in (outer, inner):
            if fd >= 0:
                os.close(fd)


def _make(name: str, within: int | None = None) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=within)
    except FileExistsError:
        return  # the caller checks what it is
    # A umask may have removed permissions of the owner.
    found = os.stat(name, dir_fd=within, follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode) and found.st_mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=within)


def make_private(path: str) -> None:
    """Create a directory and its missing parents, for this user only. Raises OSError."""
    if os.path.isdir(path):
        return
    make_private(os.path.dirname(path))
    _make(path)
    if not os.path.isdir(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


# How many blocks of usable_by_owner() changed the umask, and what it was before.
_umask_lock = forks.lock()
_umask_changes = 0
_umask_before = 0


@contextmanager
def usable_by_owner() -> Iterator[None]:
    """Within the block, the owner can use the files that this process and its children create.

    With a umask such as 0777, a compiler could not even read its own temporary files. Only with
    such a umask, its bits for the owner are cleared until the block ends. The umask belongs to the
    whole process, so that is so for other threads, too.
    """
    global _umask_changes, _umask_before
    with _umask_lock:
        changed = bool(_umask_changes) or bool(_umask() & 0o700)
        if changed:
            _umask_changes += 1
            if _umask_changes == 1:
                _umask_before = os.umask(0o077)
                os.umask(_umask_before & 0o077)
    try:
        yield
    finally:
        if changed:
            with _umask_lock:
                _umask_changes -= 1
                if not _umask_changes:
                    os.umask(_umask_before)


def _umask() -> int:
    try:
        # Asking the system call means setting it, and other threads may make a file meanwhile.
        with open("/proc/self/status", "rb") as file:
            return int(file.read().partition(b"\nUmask:")[2].split(None, 1)[0], 8)
    except (OSError, ValueError, IndexError):
        before = os.umask(0o077)
        os.umask(before)
        return before
