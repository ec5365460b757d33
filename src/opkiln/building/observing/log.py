"""The log of the observer: what one step of a build did.

The log is evidence of what was read only if it is complete. Every program that was started must
have announced itself: a static program, or one that the dynamic linker did not preload into, leaves
a gap. So does a record that was lost. A log with a gap still tells what was started and written.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple, TypeVar

BEGAN, LOADED, STARTS, FAILED, SHELL = "B", "L", "S", "F", "C"
READ, FOUND, DIRECTORY, LISTED, LED, ABSENT = "R", "E", "I", "D", "P", "N"
MADE, CHANGED = "W", "A"
SEARCHED, ASKED = "Q", "O"

WHOLE = ".whole"  # the file beside a log that is there as long as no record was lost


class Identity(NamedTuple):
    """The file behind a descriptor when it was opened."""

    device: int
    inode: int
    size: int
    ctime_ns: int

    @classmethod
    def now(cls, path: str, *, follow: bool = True) -> Identity:
        """The file that a path leads to. Raises OSError."""
        found = os.stat(path, follow_symlinks=follow)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)


NOT_A_LINK = Identity(0, 0, 0, 0)  # of a path that was asked whether it is one


class Started(NamedTuple):
    """A program that ran."""

    program: str  # its file; for a script, that of its interpreter; empty if it did not tell
    asked_for: str  # what its parent asked for: a path or a name on PATH; empty if not known
    parent: int  # the place of its parent in ``Observation.started``; -1 for the first


class Observation:
    """What a step did. All paths are absolute, and as the program spelled them."""

    def __init__(self) -> None:
        # The file behind each path that was read, looked up or loaded: several if it was exchanged.
        self.read: dict[str, tuple[Identity, ...]] = {}
        # Those that were looked up or loaded: whether they are programs counts.
        self.found: set[str] = set()
        self.loaded: set[str] = set()  # the programs and their shared libraries
        self.directories: set[str] = set()  # looked up
        self.listed: set[str] = set()  # directories whose names were read
        # Paths of which it was asked whether they are links, or where they lead.
        self.led: set[str] = set()
        # path -> its writers' places in ``started``, in order
        self.written: dict[str, tuple[int, ...]] = {}
        self.made: set[str] = set()  # written before anything read them: its own
        self.extended: set[str] = set()  # written into, with what was in them before
        # Read, then written: which of the two contents counts is not known.
        self.rewritten: set[str] = set()
        self.absent: set[str] = set()  # looked for; somebody may have made them since
        self.started: list[Started] = []  # in the order in which they began
        self.libraries: set[str] = set()  # names that shared libraries were asked for by
        self.searched: set[str] = set()  # directories where they were looked for first
        self.complete = True  # False: there may be more
        self.lost = ""  # what the observer could not tell, in its words
        # (LISTED or LED, path) -> the directory, or the link itself, when it was listed or followed
        self.passed: dict[tuple[str, str], tuple[Identity, ...]] = {}

    @property
    def called(self) -> tuple[str, ...]:
        """The absolute paths that programs were started by; they may be links."""
        called = (each.asked_for for each in self.started)
        return tuple(dict.fromkeys(path for path in called if path.startswith("/")))


def start(path: str) -> None:
    """Make an empty log, to which the programs of a step can only add. Raises OSError."""
    for name in (path, path + WHOLE):
        with open(name, "wb"):
            pass


def finish(path: str) -> Observation | None:
    """The observation in a log that ``start`` made, which is removed; None if it is gone."""
    found, whole = None, os.path.exists(path + WHOLE)
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        found = parse(file.read())
    for name in (path, path + WHOLE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    if found is not None and not whole:
        found.complete = False
    return found


def parse(log: bytes) -> Observation | None:
    """The observation in a log; None if no program announced itself."""
    reading = _Reading()
    seen = reading.seen
    complete = log.endswith(b"\0")
    said = set[str]()  # since the last write; what is said again adds nothing
    for entry in os.fsdecode(log).split("\0")[:-1]:
        if entry in said:
            continue
        try:
            complete = reading.take(entry.split(" ", 6)) and complete
        except (ValueError, IndexError):
            complete = False
        if entry.startswith((MADE, CHANGED)):
            said.clear()
        elif not entry.startswith((BEGAN, STARTS, FAILED, SHELL)):
            said.add(entry)
    if not seen.started:
        return None
    seen.complete = complete and not reading.starting and not any(reading.shells.values())
    for asked_for in reading.starting.values():  # it may run, but it said nothing
        seen.started.append(Started("", *asked_for))
    seen.directories -= seen.made
    seen.absent -= seen.made
    return seen


def _identity(fields: list[str]) -> Identity:
    seconds, _, nanoseconds = fields[5].partition(".")
    ctime_ns = int(seconds) * 1_000_000_000 + int(nanoseconds)
    return Identity(int(fields[2]), int(fields[3]), int(fields[4]), ctime_ns)


K = TypeVar("K")


def _add(identities: dict[K, tuple[Identity, ...]], at: K, identity: Identity) -> None:
    known = identities.get(at, ())
    if identity not in known:
        identities[at] = (*known, identity)


class _Reading:
    """The records of a log so far."""

    def __init__(self) -> None:
        self.seen = seen = Observation()
        self._plain = {
            ABSENT: seen.absent,
            DIRECTORY: seen.directories,
            LISTED: seen.listed,
            LED: seen.led,
            ASKED: seen.libraries,
        }
        self._opened: set[str] = set()  # for reading
        self.shells: dict[int, int] = {}  # process -> shells of its that have not begun yet
        # Processes whose program has not announced itself yet: what was asked for, and by whom.
        self.starting: dict[int, tuple[str, int]] = {}
        self._running: dict[int, int] = {}  # process -> its place in ``started``
        self._observed: set[int] = set()  # said themselves that they will run another program

    def take(self, fields: list[str]) -> bool:
        """Add a record; False for a gap. Raises ValueError, IndexError for a damaged one."""
        seen, kind, process, first = self.seen, fields[0], int(fields[1]), int(fields[2])
        path = fields[6]
        if "//" in path:
            path = re.sub("/{2,}", "/", path)
        if kind in (LISTED, LED):
            _add(seen.passed, (kind, path), _identity(fields))
        if kind in (READ, FOUND, LOADED):
            _add(seen.read, path, _identity(fields))
            (self._opened if kind == READ else seen.found).add(path)
            if kind == LOADED:
                seen.loaded.add(path)
        elif kind in self._plain:
            self._plain[kind].add(path)
        elif kind == SEARCHED:
            seen.searched.update(each for each in re.split("[:;]", path) if each)
        elif kind in (MADE, CHANGED):
            self._write(kind, path, self._place(process, int(fields[3])))
        else:
            return self._start(kind, process, first, int(fields[3]), path)
        return True

    def _write(self, kind: str, path: str, writer: int) -> None:
        seen = self.seen
        earlier = (each for each in seen.written.get(path, ()) if each != writer)
        seen.written[path] = (*earlier, writer)
        if kind == CHANGED and path not in seen.made:
            seen.extended.add(path)
        if path in self._opened:
            if path not in seen.made:
                seen.rewritten.add(path)
        elif path in seen.read:  # it was looked up, and is there
            del seen.read[path]
            seen.found.discard(path)
        elif kind == MADE:
            seen.made.add(path)

    def _place(self, process: int, parent: int) -> int:
        """The place of the program that a process runs: its own, or that of the parent which it was
        forked from; the first, if neither is known."""
        if process not in self._running and parent in self._running:
            self._running[process] = self._running[parent]
        return self._running.get(process, 0)

    def _start(self, kind: str, process: int, first: int, parent: int, path: str) -> bool:
        if kind == BEGAN:
            # No program that is not observed may be in between, but for that of the first. So its
            # parent must be known, or the process was observed before: a shell's child that is a
            # copy of the shell announces no program.
            known = first in self._running or process in self._running or process in self._observed
            place = self._place(process, first) if self.seen.started else -1
            asked_for = self.starting.pop(process, ("", 0))[0]
            if process not in self._observed and self.shells.get(first):
                self.shells[first] -= 1
            self._running[process] = len(self.seen.started)
            self.seen.started.append(Started(path, asked_for, place))
            return known or place == -1
        if kind == STARTS:
            if first == process:
                self._observed.add(process)
            begun = self._running.get(first)
            if first == process or begun is None:
                self.starting[first] = path, self._place(process, parent)
            elif not self.seen.started[begun].asked_for:
                # A spawned child is recorded by its parent, perhaps after it has begun.
                self.seen.started[begun] = self.seen.started[begun]._replace(asked_for=path)
        elif kind == FAILED:
            self.starting.pop(process, None)
        elif kind == SHELL:
            self.shells[process] = self.shells.get(process, 0) + 1
        else:
            self.seen.lost = path
            return False
        return True
