"""What a file system has left, and what its mount allows."""

from __future__ import annotations

import os
from typing import NamedTuple


class Room(NamedTuple):
    """A file system, asked at the directory that is there or would be made."""

    path: str  # the nearest directory that exists
    free: int  # bytes for this user
    total: int
    inodes: int | None  # left for this user; None where the file system makes them as needed
    noexec: bool
    read_only: bool


def of(path: str) -> Room:
    """The room for ``path``, which need not exist. Raises OSError."""
    there = os.path.abspath(path)
    while not os.path.isdir(there) and there != "/":
        there = os.path.dirname(there)
    found = os.statvfs(there)
    return Room(
        path=there,
        free=found.f_bavail * found.f_frsize,
        total=found.f_blocks * found.f_frsize,
        inodes=found.f_favail if found.f_files else None,
        noexec=bool(found.f_flag & os.ST_NOEXEC),
        read_only=bool(found.f_flag & os.ST_RDONLY),
    )


def elsewhere(least: int) -> str:
    """A directory of the system that this user may write to, and run what is written, with
    ``least`` bytes left; empty where there is none."""
    for place in ("/tmp", "/var/tmp", os.path.expanduser("~"), "/dev/shm"):
        if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            found = of(place)
            if not found.noexec and not found.read_only and found.free >= least:
                return place
    return ""
