"""The file through which processes share the slots, and the order in which they get them.

The whole state is POSIX record locks on one file, which stays empty. The kernel releases the locks
when their holder dies, for whatever reason. So nothing needs repair, and there is no server. A lock
covers a range of bytes. The ranges lie in three areas:

- **Slots.** Slot *n* is free if nobody has a lock in its range. The length of a lock says how much
  memory the step expects. A stopped process (state T in /proc) does not count: another process may
  use its slot, with a lock next to the first one. When the stopped process continues, both run
  until one of their steps ends. Neither gets the slot again until both have released it.
  One slot does not belong to a CPU. This *extra* slot is for a process that has no slot and has
  wanted one for ``STARVING_AFTER`` seconds. It runs one step in addition to all others, if there is
  enough memory left.
- **Waiting.** A process that waits has a lock here. Its position is (number of slots that it holds,
  time when it began to wait with that many). The lowest position goes first: the process that holds
  the fewest slots, and among equals the one that has waited longest. "Is anybody before me?" is one
  ``F_GETLK``.
- **Starving.** The same for the extra slot: the process that has waited longest goes first.

So a process with an hour of steps leaves its next slot to a process that has none. If no step ends,
the processes without a slot take turns with the extra one. A step that needs several slots keeps
its place until they are free, and nobody behind it takes them in the meantime.

Only the order relies on cooperation. That a slot has one holder does not: each process locks first
and then looks for others. So if two collide, at least one sees the other and steps back. A waiter
that leaves free slots unused is overtaken: at once if it is stopped, after two seconds if its state
is not visible (it is in another pid namespace), otherwise after a minute.
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
from collections.abc import Iterator
from typing import NamedTuple

from opkiln.run import events
from opkiln.run.child import is_stopped

STARVING_AFTER = 0.5  # seconds without a slot until a process may use the extra one
_STILL_STARVING = 2.0  # a process that asks again within these seconds still counts as starving
_PASSED_AFTER, _UNSEEN_PASSED_AFTER = 60.0, 2.0  # seconds that a waiter may leave free slots unused

# The areas. The range of a slot has room for its holder and for the stopped processes that held it
# before. A waiting process has a row, with a byte for each slot.
_HOLDER = 256
_SLOT = 64 * _HOLDER
_ROW = 1 << 14
EXTRA = _ROW - 1  # not the number of any CPU
_TIER = _ROW << 42  # a row for each millisecond of 139 years
_LAST_TIER = 31
_STARVING, _WAITING = 1 << 60, 1 << 61
_WAITING_END = _WAITING + (_LAST_TIER + 1) * _TIER

_UNIT, _MOST_UNITS = 64 << 20, _HOLDER - 1  # bytes of memory; the most units also mean "or more"
_FLOCK = struct.Struct("hhqqi4x")  # on 64-bit Linux: type, whence, start, length, pid


class SlotRequest(NamedTuple):
    """The request of a step for slots."""

    slots: tuple[int, ...]  # any of these
    want: int  # this many, or none
    wider: int  # up to this many, if nobody else waits for them
    most: int | None  # how many steps this process may run at once
    memory: int  # bytes that the step expects to use with ``want`` slots
    budget: int  # bytes that all steps together may use


class _HeldLock(NamedTuple):
    """A lock of another process."""

    start: int
    length: int
    pid: int  # 0 if it is in another pid namespace


class SlotTable:
    """The slots of one file, for this process and its threads.

    Record locks belong to a process. They do not exclude its threads from one another, and closing
    *any* descriptor of the file releases all of them. So there is one table per file and process.
    It never closes its descriptor, and it records what the threads hold. ``path`` is None if
    there is no such file. Then the table applies to this process only.
    """

    def __init__(self, path: str | None, fd: int) -> None:
        self.path = path
        self.broken = ""
        self._fd = fd
        self.reset()

    def reset(self) -> None:
        """Start over, as after a fork: the child holds no locks and has no other threads."""
        self.changed = threading.Condition()
        self._held: dict[int, tuple[int, int]] = {}  # slot -> start and length of its lock
        self._running = 0
        self._given = 0  # how many steps of this process have ended
        self._queue: list[
            SlotRequest
        ] = []  # the threads' requests in order, told apart by identity
        self._ticket = 0  # when the first of them began to wait; 0 if none has
        self._lines: list[tuple[int, int]] = []  # start and length of our locks as a waiter
        self._starving_since: float | None = None
        self._extra_given = 0.0
        # area -> the waiter ahead of us, and since when it has left slots unused
        self._behind: dict[int, tuple[int, float]] = {}
        self._passed: set[int] = set()  # waiters that we overtook
        self._states: dict[int, bool] = {}

    # The caller of any method below must hold ``changed``.

    def join(self, ask: SlotRequest) -> None:
        """Join the queue. ``leave`` must follow, unless ``take`` succeeds."""
        recently = time.monotonic() - self._extra_given < _STILL_STARVING
        if not self._queue and not self._held and not recently:
            self._starving_since = None
        self._queue.append(ask)

    def leave(self, ask: SlotRequest) -> None:
        """Leave the queue."""
        self._queue = [each for each in self._queue if each is not ask]
        if self._first() is None:
            self._leave_lines()
        self.changed.notify_all()

    def take(self, ask: SlotRequest) -> tuple[int, ...]:
        """Take the slots. If they are not free, return () and let this process wait for them."""
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
        """Give back slots that ``take`` returned."""
        self._unlock(slots)
        self._given += 1
        # Our next step comes after those of processes that now hold as few slots.
        self._ticket = 0
        if EXTRA in slots:
            self._extra_given = time.monotonic()
        self._running -= 1
        self.changed.notify_all()

    def is_next(self, ask: SlotRequest) -> bool:
        """Whether this request was next, in this process and among all, when it last tried."""
        return self._first() is ask and _WAITING not in self._behind

    def holder(self, ask: SlotRequest) -> int | None:
        """The pid of another process that holds one of the slots or is ahead in the queue."""
        for slot in (*ask.slots, EXTRA):
            if slot not in self._held:
                for each in self._holders(slot):
                    return each.pid
        before = self._find_before(ask, time.monotonic())
        return before.pid if before else None

    def holders(self, ask: SlotRequest) -> tuple[object, ...]:
        """The holders of the slots. It changes whenever a step ends, in this process or another,
        unless that process starts its next step in the same slot."""
        others = (
            each
            for slot in (*ask.slots, EXTRA)
            for each in self._locks(slot * _SLOT, (slot + 1) * _SLOT)
        )
        return (self._given, *others)

    # The order

    def _first(self) -> SlotRequest | None:
        """The first request in the queue. One that must wait for its own ``most`` is skipped."""
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

    def _find_before(self, ask: SlotRequest, now: float) -> _HeldLock | None:
        """A process that waits for some of these slots and is ahead of us."""
        return self._front(_WAITING, self._tier() + self._ticket * _ROW, ask.slots, ask.want, now)

    def _front(
        self, area: int, mine: int, slots: tuple[int, ...], want: int, now: float
    ) -> _HeldLock | None:
        """The waiter before ``mine`` in an area, unless it has left slots unused for too long."""
        for found in self._list_waiting(area, mine, slots):
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

    def _list_waiting(self, start: int, end: int, slots: tuple[int, ...]) -> Iterator[_HeldLock]:
        """Other processes that wait for some of these slots, in order."""
        for found in self._locks(start, end):
            first = found.start % _ROW
            if any(first <= slot < first + found.length for slot in slots):
                yield found

    def _stand_in_line(self, ask: SlotRequest, for_extra: bool) -> None:
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
            self._ticket += 1  # another process came in the same millisecond, so try the next one

    def _leave_lines(self) -> None:
        self._clear_lines()
        self._ticket = 0
        self._behind.clear()

    def _clear_lines(self) -> None:
        while self._lines:
            self._clear(*self._lines.pop())

    # The slots

    def _take_slots(self, ask: SlotRequest, now: float) -> tuple[tuple[int, ...], bool]:
        """(CPU slots or none, whether the step in the extra slot must end first)."""
        if self._find_before(ask, now) is not None:
            return (), False
        taken = self._lock_some(ask)
        if not taken:
            return (), False
        if not self._fits(ask):
            self._unlock(taken)
            return (), True
        self._starving_since = None
        return taken, False

    def _take_extra(self, ask: SlotRequest, now: float) -> tuple[tuple[int, ...], bool]:
        """(the extra slot or none, whether to wait for it)."""
        mine = _STARVING + self._ticket * _ROW
        if self._front(_STARVING, mine, (EXTRA,), 1, now) is not None:
            return (), True
        if not self._lock(EXTRA, _units(ask.memory)):
            return (), True
        if not self._fits(ask):
            self._unlock((EXTRA,))
            return (), False
        return (EXTRA,), False

    def _lock_some(self, ask: SlotRequest) -> tuple[int, ...]:
        """Lock ``want`` of the slots, or up to ``wider`` if nobody else waits for them, or none."""
        free = [slot for slot in ask.slots if slot not in self._held]
        most = max(ask.want, ask.wider)
        if most > ask.want:
            others = self._list_waiting(_WAITING, _WAITING_END, ask.slots)
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
        """Take one slot: lock it first, then look for other holders."""
        start, end = slot * _SLOT, (slot + 1) * _SLOT
        for other in self._locks(start, end):
            if not self._is_stopped(other.pid):
                return False
            start = (other.start // _HOLDER + 1) * _HOLDER
        if start >= end or not self._set(start, units):
            return False
        self._held[slot] = (start, units)
        # Ask /proc again: a process that was stopped a moment ago may run again.
        if not all(is_stopped(other.pid) for other in self._locks(slot * _SLOT, end)):
            self._unlock((slot,))
            return False
        return True

    def _unlock(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self._clear(*self._held.pop(slot))

    def _holders(self, slot: int) -> Iterator[_HeldLock]:
        """Other processes that hold a slot and are not stopped."""
        for found in self._locks(slot * _SLOT, (slot + 1) * _SLOT):
            if not self._is_stopped(found.pid):
                yield found

    def _fits(self, ask: SlotRequest) -> bool:
        """Whether the step in the extra slot, if any, and all others fit into the memory. Without a
        step in the extra slot they always fit: each slot comes with its share."""
        extra = self._locks(EXTRA * _SLOT, (EXTRA + 1) * _SLOT)
        if EXTRA not in self._held and not any(extra):
            return True
        units = [length for _, length, _ in self._locks(0, (EXTRA + 1) * _SLOT)]
        units += [length for _, length in self._held.values()]
        return max(units) < _MOST_UNITS and sum(units) * _UNIT <= ask.budget

    def _is_stopped(self, pid: int) -> bool:
        """Whether a process is stopped. Remembered for the length of one attempt."""
        if pid not in self._states:
            self._states[pid] = is_stopped(pid)
        return self._states[pid]

    # The locks

    def _locks(self, start: int, end: int) -> Iterator[_HeldLock]:
        """Locks of other processes between ``start`` and ``end``, in order."""
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
            yield _HeldLock(at, length, pid)
            start = at + length if length else end  # length 0 means "to the end of the file"

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
        text = f"the build budget applies to this process only: {self.broken}"
        events.emit(events.NOTE, text=text)

    def _clear(self, start: int, length: int) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError) if self.broken else contextlib.nullcontext():
                fcntl.lockf(self._fd, fcntl.LOCK_UN, length, start)


def _runs(slots: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first, length) of each run of consecutive slots."""
    first = last = slots[0]
    for slot in slots[1:]:
        if slot != last + 1:
            yield first, last + 1 - first
            first = slot
        last = slot
    yield first, last + 1 - first


def _units(memory: int) -> int:
    """The length of a lock for a step that expects this much memory."""
    return min(_MOST_UNITS, max(1, math.ceil(memory / _UNIT)))
