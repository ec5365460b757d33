"""The file through which processes share the slots, and the order in which they get them.

All state is POSIX record locks on one file, which stays empty. The kernel releases them when their
holder dies, whatever it died of, so there is nothing to repair and nobody to ask. A lock covers a
range of bytes, and there are three areas of them:

- **Slots.** Slot *n* is free when nobody has a lock in its range. The length of a lock says how
  much memory the step expects. A process that is stopped (state T in /proc) does not count:
  another may use its slot, with a lock beside it. When the stopped process continues, both run
  until one of their steps ends; neither gets the slot again before it is free of both.
  One slot belongs to no CPU. This *extra* slot is for a process that has no slot and has wanted one
  for ``STARVING_AFTER`` seconds. It runs one step beside all others, if memory is left for it.
- **Waiting.** A process that has to wait has a lock at the position (slots that it holds, when it
  began to wait with so many). Whoever is further to the front goes first: the process that holds
  fewest slots, and among equals the one that waits longest. "Is anybody before me?" is one
  ``F_GETLK``.
- **Starving.** The same for the extra slot: the process that waits longest goes first.

So a process with an hour of steps leaves the next slot it would take to one that has none. If no
step ends, the processes that have none use the extra slot in turn. A step that needs several slots
keeps its place until they are free, and nobody behind it takes them meanwhile.

Only the order depends on good will. That a slot has one holder does not: each process locks first
and looks for others afterwards, so of two that meet, at least one sees the other and steps back. A
waiter that leaves free slots unused is passed: at once if it is stopped, after two seconds if its
state cannot be seen (it is in another pid namespace), else after a minute.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import struct
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from opkiln.engine import events

if TYPE_CHECKING:
    from collections.abc import Iterator

STARVING_AFTER = 0.5  # seconds without a slot until a process may use the extra one
_STILL_STARVING = 2.0  # a process that comes back this soon need not starve again
_PASSED_AFTER, _UNSEEN_PASSED_AFTER = 60.0, 2.0  # seconds that a waiter leaves free slots unused

# The areas. A slot has room for its holder and for the stopped processes that had it before; a row
# of those who wait has a byte for each slot.
_HOLDER = 256
_SLOT = 64 * _HOLDER
_ROW = 1 << 14
EXTRA = _ROW - 1  # a number that no CPU has
_TIER = _ROW << 42  # a row for each millisecond: 139 years
_LAST_TIER = 31
_STARVING, _WAITING = 1 << 60, 1 << 61
_WAITING_END = _WAITING + (_LAST_TIER + 1) * _TIER

_UNIT, _MOST_UNITS = 64 << 20, _HOLDER - 1  # of memory for each slot; the most: or more than that
_FLOCK = struct.Struct("hhqqi4x")  # of 64-bit Linux: type, whence, start, length, pid


class Ask(NamedTuple):
    """What a step asks for."""

    slots: tuple[int, ...]  # any of these
    want: int  # so many, or none
    wider: int  # up to so many, if nobody else waits for them
    most: int | None  # steps that this process may run at once
    memory: int  # bytes that ``want`` slots are for
    budget: int  # bytes that all steps together may expect


class _Locked(NamedTuple):
    """A lock of another process."""

    start: int
    length: int
    pid: int  # 0: it is in another pid namespace


class Table:
    """The slots of one file, as this process and its threads see them.

    Record locks belong to a process: its threads do not exclude one another by them, and closing
    *any* descriptor of the file gives all of them up. Hence one table per file and process, its
    descriptor never closed, and the record of what the threads hold. ``path`` is None when there
    is no file: then the table holds within this process.
    """

    def __init__(self, path: str | None, fd: int) -> None:
        self.path = path
        self.broken = ""
        self._fd = fd
        self.reset()

    def reset(self) -> None:
        """As after a fork, where no lock is held and no other thread exists."""
        self.changed = threading.Condition()
        self._held: dict[int, tuple[int, int]] = {}  # slot: start and length of its lock
        self._running = 0
        self._queue: list[Ask] = []  # of the threads, in their order; told apart by identity
        self._ticket = 0  # when the first of them began to wait; 0: none did yet
        self._lines: list[tuple[int, int]] = []  # start and length of its locks in the lines
        self._starving_since: float | None = None
        self._extra_given = 0.0
        self._behind: dict[int, tuple[int, float]] = {}  # area: whom, and since when slots are free
        self._passed: set[int] = set()
        self._states: dict[int, bool] = {}

    # Every method from here on is called with ``changed`` held.

    def join(self, ask: Ask) -> None:
        """Begin to ask. ``leave`` must follow unless ``take`` succeeds."""
        recently = time.monotonic() - self._extra_given < _STILL_STARVING
        if not self._queue and not self._held and not recently:
            self._starving_since = None
        self._queue.append(ask)

    def leave(self, ask: Ask) -> None:
        """Ask no longer."""
        self._queue = [each for each in self._queue if each is not ask]
        if self._first() is None:
            self._leave_lines()
        self.changed.notify_all()

    def take(self, ask: Ask) -> tuple[int, ...]:
        """The slots, or none, and then this process stands in line for them."""
        if self._first() is not ask:
            return ()
        now = time.monotonic()
        self._ticket = self._ticket or int(now * 1000)
        self._states.clear()
        taken, for_extra = self._take_slots(ask, now)
        if not taken and self._is_starving(now):
            taken, for_extra = self._take_extra(ask, now)
        if not taken:
            self._stand_in_line(ask, for_extra)
            return ()
        self._running += 1
        self._leave_lines()
        self.leave(ask)
        return taken

    def give(self, slots: tuple[int, ...]) -> None:
        """Slots that ``take`` gave."""
        self._unlock(slots)
        self._ticket = 0  # its next step comes after those of processes that hold as few now
        if EXTRA in slots:
            self._extra_given = time.monotonic()
        self._running -= 1
        self.changed.notify_all()

    def is_next(self, ask: Ask) -> bool:
        """Whether this thread of this process was next when it last tried."""
        return self._first() is ask and _WAITING not in self._behind

    def holder(self, ask: Ask) -> int | None:
        """The pid of another process that holds one of the slots, or waits before this one."""
        for slot in (*ask.slots, EXTRA):
            if slot not in self._held:
                for each in self._holders(slot):
                    return each.pid
        before = self._before(ask, time.monotonic())
        return before.pid if before else None

    # The order

    def _first(self) -> Ask | None:
        """The thread whose turn it is; one that its own limit holds back does not count."""
        for ask in self._queue:
            if ask.most is None or self._running < ask.most:
                return ask
        return None

    def _is_starving(self, now: float) -> bool:
        if self._held:
            return False
        if self._starving_since is None:
            self._starving_since = now
        return now - self._starving_since >= STARVING_AFTER

    def _tier(self) -> int:
        return _WAITING + min(len(self._held), _LAST_TIER) * _TIER

    def _before(self, ask: Ask, now: float) -> _Locked | None:
        """A process that waits for some of these slots and goes first."""
        return self._front(_WAITING, self._tier() + self._ticket * _ROW, ask.slots, ask.want, now)

    def _front(
        self, area: int, mine: int, slots: tuple[int, ...], want: int, now: float
    ) -> _Locked | None:
        """Who is before ``mine`` in an area, unless it leaves slots unused for too long."""
        for found in self._waiting(area, mine, slots):
            if found.start in self._passed or self._is_stopped(found.pid):
                continue
            who, since = self._behind.get(area, (0, now))
            free = sum(not any(self._holders(slot)) for slot in slots if slot not in self._held)
            if who != found.start or free < want:
                since = now
            self._behind[area] = (found.start, since)
            if now - since < (_PASSED_AFTER if found.pid > 0 else _UNSEEN_PASSED_AFTER):
                return found
            self._passed.add(found.start)
        self._behind.pop(area, None)
        return None

    def _waiting(self, start: int, end: int, slots: tuple[int, ...]) -> Iterator[_Locked]:
        """Other processes that wait for some of these slots, in their order."""
        for found in self._locks(start, end):
            first = found.start % _ROW
            if any(first <= slot < first + found.length for slot in slots):
                yield found

    def _stand_in_line(self, ask: Ask, for_extra: bool) -> None:
        while True:
            row = self._ticket * _ROW
            lines = [(self._tier() + row + first, length) for first, length in _runs(ask.slots)]
            if for_extra:
                lines.append((_STARVING + row + EXTRA, 1))
            if lines == self._lines:
                return
            self._clear_lines()
            for line in lines:
                if not self._set(*line):
                    break
                self._lines.append(line)
            else:
                return
            self._ticket += 1  # another process came in the same millisecond

    def _leave_lines(self) -> None:
        self._clear_lines()
        self._ticket = 0
        self._behind.clear()

    def _clear_lines(self) -> None:
        while self._lines:
            self._clear(*self._lines.pop())

    # The slots

    def _take_slots(self, ask: Ask, now: float) -> tuple[tuple[int, ...], bool]:
        """Slots of the CPUs or none; and whether the extra slot's step must end first."""
        if self._before(ask, now) is not None:
            return (), False
        taken = self._lock_some(ask)
        if not taken:
            return (), False
        if not self._fits(ask):
            self._unlock(taken)
            return (), True
        self._starving_since = None
        return taken, False

    def _take_extra(self, ask: Ask, now: float) -> tuple[tuple[int, ...], bool]:
        """The extra slot or none; and whether it is worth waiting for."""
        mine = _STARVING + self._ticket * _ROW
        if self._front(_STARVING, mine, (EXTRA,), 1, now) is not None:
            return (), True
        if not self._lock(EXTRA, _units(ask.memory)):
            return (), True
        if not self._fits(ask):
            self._unlock((EXTRA,))
            return (), False
        return (EXTRA,), False

    def _lock_some(self, ask: Ask) -> tuple[int, ...]:
        """``want`` of the slots, up to ``wider`` if nobody else waits for them, or none."""
        free = [slot for slot in ask.slots if slot not in self._held]
        most = max(ask.want, ask.wider)
        if most > ask.want:
            others = self._waiting(_WAITING, _WAITING_END, ask.slots)
            if not all(self._is_stopped(each.pid) for each in others):
                most = ask.want
        taken: list[int] = []
        for left, slot in zip(range(len(free), 0, -1), free, strict=True):
            if len(taken) + left < ask.want or len(taken) >= most:
                break
            if self._lock(slot, _units(ask.memory // ask.want)):
                taken.append(slot)
        if len(taken) >= ask.want:
            return tuple(taken)
        self._unlock(tuple(taken))
        return ()

    def _lock(self, slot: int, units: int) -> bool:
        """Take one slot: first a lock on it, then a look for others."""
        start, end = slot * _SLOT, (slot + 1) * _SLOT
        for other in self._locks(start, end):
            if not self._is_stopped(other.pid):
                return False
            start = (other.start // _HOLDER + 1) * _HOLDER
        if start >= end or not self._set(start, units):
            return False
        self._held[slot] = (start, units)
        # Asked anew: one that was stopped a moment ago may have come back for the slot.
        if not all(_is_stopped(other.pid) for other in self._locks(slot * _SLOT, end)):
            self._unlock((slot,))
            return False
        return True

    def _unlock(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self._clear(*self._held.pop(slot))

    def _holders(self, slot: int) -> Iterator[_Locked]:
        """Other processes that hold a slot and are not stopped."""
        for found in self._locks(slot * _SLOT, (slot + 1) * _SLOT):
            if not self._is_stopped(found.pid):
                yield found

    def _fits(self, ask: Ask) -> bool:
        """Whether there is memory for the extra slot's step beside all others.

        Without that step there is: a slot stands for its share of the memory.
        """
        extra = self._locks(EXTRA * _SLOT, (EXTRA + 1) * _SLOT)
        if EXTRA not in self._held and not any(extra):
            return True
        units = [length for _, length, _ in self._locks(0, (EXTRA + 1) * _SLOT)]
        units += [length for _, length in self._held.values()]
        return max(units) < _MOST_UNITS and sum(units) * _UNIT <= ask.budget

    def _is_stopped(self, pid: int) -> bool:
        """Whether a process is stopped, asked once for each attempt."""
        if pid not in self._states:
            self._states[pid] = _is_stopped(pid)
        return self._states[pid]

    # The locks

    def _locks(self, start: int, end: int) -> Iterator[_Locked]:
        """Locks of other processes from ``start`` to before ``end``, in their order."""
        while self.path is not None and not self.broken and start < end:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
            try:
                answer = fcntl.fcntl(self._fd, fcntl.F_GETLK, asked)
            except OSError as error:
                self._break(error)
                return
            kind, _, at, length, pid = _FLOCK.unpack(answer)
            if kind == fcntl.F_UNLCK:
                return
            yield _Locked(at, length, pid)
            start = at + length if length else end  # 0: to the end of all files

    def _set(self, start: int, length: int) -> bool:
        if self.path is None or self.broken:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            self._break(error)
        return True

    def _break(self, error: OSError) -> None:
        self.broken = f"{self.path}: cannot be locked ({error.strerror})"
        events.emit(events.NOTE, text=f"builds are bounded in this process alone: {self.broken}")

    def _clear(self, start: int, length: int) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError) if self.broken else contextlib.nullcontext():
                fcntl.lockf(self._fd, fcntl.LOCK_UN, length, start)


def _runs(slots: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First and length of each run of neighbours."""
    first = last = slots[0]
    for slot in slots[1:]:
        if slot != last + 1:
            yield first, last + 1 - first
            first = slot
        last = slot
    yield first, last + 1 - first


def _units(memory: int) -> int:
    """What a lock says of the memory that a step expects, by its length."""
    return min(_MOST_UNITS, max(1, math.ceil(memory / _UNIT)))


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped; False if it is in another pid namespace."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command may hold anything; the fields begin after its last parenthesis.
            return file.read().rpartition(b")")[2].split()[:1] == [b"T"]
    except OSError:
        return False
