"""Finds a process that reads a file without an end: a FIFO that nobody writes to, or ``/dev/zero``.

A compiler opens whatever an ``#include`` leads to. If that is a FIFO, it waits until its time limit
ends it. If it is ``/dev/zero`` or ``/dev/urandom``, it takes memory until there is none left.
``/proc`` shows both: which file a process is opening, and which it has open.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# The numbers of open, openat and openat2, and which argument is the path.
_OPENING = {
    "x86_64": {2: 0, 257: 1, 437: 1},
    "aarch64": {56: 1, 437: 1},
}.get(os.uname().machine, {})
_ENDLESS = (os.makedev(1, 5), os.makedev(1, 7))  # /dev/zero and /dev/full
_RANDOM = (os.makedev(1, 8), os.makedev(1, 9))  # /dev/random and /dev/urandom
# A program may keep such a device open, to take a few bytes from it now and then. One that has read
# so many bytes, of whatever, does not.
_MUCH = 64 << 20
_LONGEST = 4096  # bytes of a path


def found(pids: Iterable[int], made_below: str) -> tuple[str, str] | None:
    """(the name of a process, the file that it reads) if one of these reads a file without an end.

    A step may make FIFOs of its own: those below ``made_below`` do not count.
    """
    for pid in pids:
        path = _being_opened(pid) or _opened(pid)
        if path is not None and not (made_below and path.startswith(made_below + "/")):
            return _name(pid), path
    return None


def _being_opened(pid: int) -> str | None:
    """The FIFO that a process waits for in ``open``."""
    try:
        with open(f"/proc/{pid}/syscall", "rb") as file:
            number, *arguments = file.read().split()
        place = _OPENING.get(int(number))
        if place is None:
            return None
        directory = "cwd" if place == 0 else _directory(int(arguments[0], 16))
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(int(arguments[place], 16))
            name = os.fsdecode(_text(memory.read(_LONGEST)))
        path = os.path.join(f"/proc/{pid}/{directory}", name)
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return None
        return os.path.join(os.readlink(f"/proc/{pid}/{directory}"), name)
    except (OSError, ValueError):
        return None  # it runs, has just ended, or may not be looked at


def _directory(argument: int) -> str:
    """The first argument of ``openat``: a descriptor, or -100 for the working directory."""
    number = argument & 0xFFFFFFFF
    return "cwd" if number == 0xFFFFFF9C else f"fd/{number}"


def _text(data: bytes) -> bytes:
    """The C string at the start."""
    return data.partition(b"\0")[0]


def _opened(pid: int) -> str | None:
    """A named FIFO, or a device without an end, that a process has open."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return None
    for name in names:
        link = f"/proc/{pid}/fd/{name}"
        try:
            state = os.stat(link)
            if stat.S_ISCHR(state.st_mode) and (
                state.st_rdev in _ENDLESS or (state.st_rdev in _RANDOM and _read(pid) > _MUCH)
            ):
                return os.readlink(link)
            if stat.S_ISFIFO(state.st_mode) and (path := os.readlink(link)).startswith("/"):
                return path  # the other pipes have no path
        except OSError:
            continue  # it was just closed
    return None


def _read(pid: int) -> int:
    """How many bytes a process has read so far."""
    with open(f"/proc/{pid}/io", "rb") as file:
        return int(file.read().partition(b"rchar: ")[2].split()[0])


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return f"pid {pid}"
