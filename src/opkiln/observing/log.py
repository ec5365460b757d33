"""The log of the observer: what one step of a build did.

The log is evidence only if it is complete. Every program that was started must have announced
itself: a static program, or one that the dynamic linker did not preload into, leaves a gap. So does
a record that was lost. A log with a gap counts as no log.
"""

from __future__ import annotations

import os
from typing import NamedTuple

BEGAN, STARTS, FAILED, READ, WROTE, ABSENT = "B", "S", "F", "R", "W", "N"


class Identity(NamedTuple):
    """The file behind a descriptor when it was opened."""

    device: int
    inode: int
    size: int
    ctime_ns: int

    @classmethod
    def now(cls, path: str) -> Identity:
        """The file that a path leads to. Raises OSError."""
        found = os.stat(path)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)


class Observation(NamedTuple):
    """What a step did. All paths are absolute, and as the program spelled them."""

    read: dict[str, tuple[Identity, ...]]  # every file behind a path: more than one if exchanged
    written: dict[str, str]  # path -> the program that wrote it
    made: frozenset[str]  # written before anything read them: the step's own
    absent: frozenset[str]  # looked for, did not exist; somebody may have made them since
    programs: tuple[str, ...]  # in the order in which they began
    called: tuple[str, ...] = ()  # the absolute paths that programs were started by


def read(path: str) -> Observation | None:
    """The observation in a log file; None if there is none, or if it has gaps."""
    try:
        with open(path, "rb") as file:
            return parse(file.read())
    except FileNotFoundError:
        return None


def parse(log: bytes) -> Observation | None:
    """The observation in a log; None if it has gaps."""
    if not log.endswith(b"\0"):
        return None
    reading = _Reading()
    try:
        for entry in log[:-1].split(b"\0"):
            if not reading.take(os.fsdecode(entry).split(" ", 6)):
                return None
    except (ValueError, IndexError):
        return None
    if reading.starting or not reading.begun:
        return None
    read = {path: tuple(identities) for path, identities in reading.read.items()}
    made = frozenset(reading.made)
    absent = frozenset(reading.absent - made)
    programs, called = tuple(reading.begun), tuple(reading.called)
    return Observation(read, reading.written, made, absent, programs, called)


class _Reading:
    """The records of a log so far."""

    def __init__(self) -> None:
        self.read: dict[str, dict[Identity, None]] = {}
        self.written: dict[str, str] = {}
        self.made: set[str] = set()
        self.absent: set[str] = set()
        self.begun: dict[str, None] = {}  # the programs
        self.called: dict[str, None] = {}  # by these paths, which may be links
        self.starting: set[int] = set()  # processes whose program has not announced itself yet
        self._running: dict[int, str] = {}  # the program of each process
        self._observed: set[int] = set()  # said themselves that they will run another program

    def take(self, fields: list[str]) -> bool:
        """Add a record; False for a gap. Raises ValueError, IndexError for a damaged one."""
        kind, process, first, path = fields[0], int(fields[1]), int(fields[2]), fields[6]
        if kind == READ:
            seconds, _, nanoseconds = fields[5].partition(".")
            ctime_ns = int(seconds) * 1_000_000_000 + int(nanoseconds)
            identity = Identity(first, int(fields[3]), int(fields[4]), ctime_ns)
            self.read.setdefault(path, {})[identity] = None
        elif kind == ABSENT:
            self.absent.add(path)
        elif kind == WROTE:
            self.written[path] = self._running.get(process, "")
            if path not in self.read:
                self.made.add(path)
        else:
            return self._start(kind, process, first, path)
        return True

    def _start(self, kind: str, process: int, first: int, path: str) -> bool:
        if kind == BEGAN:
            # No program that is not observed may be in between, but for that of the first. So its
            # parent must be known, or the process was observed before: a shell's child that is a
            # copy of the shell announces no program.
            known = first in self._running or process in self._running or process in self._observed
            if self._running and not known:
                return False
            self._observed.discard(process)
            self._running[process] = path
            self.begun[path] = None
            self.starting.discard(process)
        elif kind == STARTS:
            if path.startswith("/"):
                self.called[path] = None
            if first == process:
                self._observed.add(process)
            # A spawned child is recorded by its parent, perhaps after it has begun.
            if first == process or first not in self._running:
                self.starting.add(first)
        elif kind == FAILED:
            self.starting.discard(process)
            self._observed.discard(process)
            self.called.pop(path, None)
        else:
            return False  # a record was lost
        return True
