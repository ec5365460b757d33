"""Who may have written what is about to be loaded.

A file of ours, or root's, that nobody else can write to is trusted. A layer that the user listed in
``OPKILN_STORE_LAYERS`` is trusted whoever owns it, as long as not everybody can write to it.
"""

from __future__ import annotations

import os
import stat


def fault(path: str, found: os.stat_result, *, listed: bool = False) -> str:
    """Why this file or directory is not to be trusted; empty when it is."""
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link"
    if listed:
        return f"{path} is writable by everybody" if found.st_mode & 0o002 else ""
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to uid {found.st_uid}, not to uid {os.getuid()} or root"
    if found.st_mode & 0o022:
        return f"{path} is writable by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def followed(path: str) -> str:
    """Where a link leads that this user made, or root; every other path as it is."""
    try:
        found = os.lstat(path)
    except OSError:
        return path
    ours = stat.S_ISLNK(found.st_mode) and found.st_uid in (os.getuid(), 0)
    return os.path.realpath(path) if ours else path


def open_to_all(root: str, base: str) -> str:
    """Why a listed layer is not to be trusted: everybody may put entries on the way to ``base``."""
    path = os.path.dirname(root)  # what the user listed; it may well be a symbolic link
    try:
        if reason := fault(path, os.stat(path), listed=True):
            return reason
        for part in os.path.relpath(base, path).split("/"):
            path = os.path.join(path, part)
            if reason := fault(path, os.lstat(path), listed=True):
                return reason
    except OSError:
        return ""  # there is nothing there
    return ""


def claim(root: str) -> str:
    """Make a store's directory and the one that holds it, for this user alone.

    Returns why they are not to be written to; empty when they are ours. Raises OSError.

    They may lie where everybody can put things (/tmp): what is checked is what was opened, and no
    link is followed. Once the outer one is ours, nobody else can put another in its place.
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
        return  # whatever it is: who opens it will see


def make_private(path: str) -> None:
    """Make a directory, and what is missing above it, for this user alone. Raises OSError."""
    if os.path.isdir(path):
        return
    make_private(os.path.dirname(path))
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
