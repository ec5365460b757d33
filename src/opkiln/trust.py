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
