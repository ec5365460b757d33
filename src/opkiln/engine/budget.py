"""One budget of CPUs and memory for all builds of a user on a host.

A slot is a CPU. Who holds slot *n* has a POSIX record lock on byte *n* of one file in a node-local
directory: the kernel releases it when its holder dies, whatever it died of, and a forked child
does not inherit it. Memory is shared out over the slots, so a step that expects more than one
slot's share takes several; all of them or none, never some while it waits for the rest.

The lock only saves the machine from too many compilers. Where it cannot be had (no directory of
our own, a file system without locks), the budget holds within this process, and a note says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import random
import stat
import struct
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from opkiln.engine import cgroup, events
from opkiln.errors import BuildCancelled
from opkiln.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.2  # seconds between two attempts
_FIRST_CALL, _NEXT_CALL = 0.2, 1.0  # seconds until a waiter is told whom it waits for, and again


class Limits(NamedTuple):
    """What there is to share, and which fact decided it."""

    slots: tuple[int, ...]  # the CPUs this process may use
    memory: int  # bytes that all builds may take together
    share: int  # bytes that come with one slot
    cpus_from: str
    memory_from: str


class Description(NamedTuple):
    """A budget in numbers, for a report."""

    limits: Limits
    max_jobs: int | None
    where: str | None  # the file of locks; None: this process alone
    refused: tuple[str, ...]  # each place that was not used, and why


def measure(root: str = "/", affinity: Collection[int] | None = None) -> Limits:
    """The CPUs and memory that may be used: affinity, cgroups, ``OPKILN_MEMORY``."""
    own = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    quota = cgroup.cpu_quota(root)
    cap = len(own) if quota is None else math.ceil(quota)
    # The memory belongs to the whole group: eight ranks pinned to 8 of 64 CPUs share it. So it is
    # divided by the slots that all of them hold together, not by those of this process.
    group = len((cgroup.cpus(root) or frozenset()).union(own))
    sharers = group if quota is None else min(group, cap)
    if settings.memory is not None:
        memory, memory_from = int(settings.memory), "OPKILN_MEMORY"
    else:
        total, limit = cgroup.total_memory(root), cgroup.memory_limit(root)
        limited = limit is not None and limit < total
        memory = int(0.8 * (limit if limit is not None and limited else total))
        memory_from = "80% of the cgroup's limit" if limited else "80% of the machine's memory"
    limiting = quota is not None and cap < len(own)
    cpus_from = f"cgroup quota of {quota:g} CPUs" if limiting else "CPU affinity"
    return Limits(tuple(own[:cap]), memory, max(1, memory // sharers), cpus_from, memory_from)


class Budget:
    """Hands out slots. One object serves all threads; ``shared()`` gives this process's."""

    def __init__(self, limits: Limits, table: _Table, refused: tuple[str, ...] = ()) -> None:
        self.limits = limits
        self._table = table
        self._refused = refused

    def slots_for(self, memory: int) -> int:
        """How many slots a step takes that expects so many bytes."""
        return min(len(self.limits.slots), max(1, math.ceil(memory / self.limits.share)))

    @contextlib.contextmanager
    def hold(
        self,
        *,
        memory: int = 0,
        threads: int = 1,
        cancelled: threading.Event | None = None,
        waiting: Callable[[int, float], None] | None = None,
    ) -> Iterator[tuple[int, ...]]:
        """Slots for a step that expects ``memory`` bytes, held for the length of the block.

        A step that can use several threads, each with ``memory`` bytes, gets slots for as many of
        them as are free at once, and for one at least; never for more than ``OPKILN_MAX_JOBS``.

        While other processes hold them, ``waiting`` is called about once a second with the pid of
        one (0 when it is in another pid namespace) and the seconds waited so far. Raises
        BuildCancelled when ``cancelled`` is set first.
        """
        table = self._table
        want, most = self.slots_for(memory), settings.max_jobs
        wider = min(len(self.limits.slots), want * threads, max(want, most or want * threads))
        started, pause, call_at = time.monotonic(), _FIRST_PAUSE, _FIRST_CALL
        while True:
            if cancelled is not None and cancelled.is_set():
                raise BuildCancelled("the build was cancelled while it waited for a free CPU")
            holder = None
            with table.changed:
                taken = table.take(self.limits.slots, want, most, wider)
                if taken:
                    break
                # A release within this process wakes us at once; one elsewhere is found by
                # looking. Random, so that two that want everything do not collide for ever.
                table.changed.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311
                waited = time.monotonic() - started
                if waiting is not None and waited >= call_at:
                    holder = table.holder(self.limits.slots)
                    call_at = waited + _NEXT_CALL
            if waiting is not None and holder is not None:
                waiting(holder, waited)
            pause = min(pause * 1.5, _LAST_PAUSE)
        pid = os.getpid()
        try:
            yield taken
        finally:
            # A fork inside the block leaves its child here without the locks.
            if os.getpid() == pid:
                table.give(taken)

    def describe(self) -> Description:
        """The numbers in force now."""
        refused = self._refused + ((self._table.broken,) if self._table.broken else ())
        where = None if self._table.broken else self._table.path
        return Description(self.limits, settings.max_jobs, where, refused)


class _Table:
    """The slots of one lock file, as this process and its threads see them.

    Record locks belong to a process: its threads do not exclude one another by them, and closing
    *any* descriptor of the file gives all of them up. Hence one table per file and process, its
    descriptor never closed, and the set of slots that the threads hold.
    """

    def __init__(self, path: str | None, fd: int) -> None:
        self.path = path
        self.broken = ""
        self._fd = fd
        self.reset()

    def reset(self) -> None:
        """As after a fork, where no lock is held and no other thread exists."""
        self.changed = threading.Condition()
        self._held: set[int] = set()
        self._running = 0

    def take(
        self, slots: tuple[int, ...], want: int, most: int | None, wider: int = 0
    ) -> tuple[int, ...]:
        """``want`` of the slots, up to ``wider`` if they are free, or none.

        ``changed`` must be held.
        """
        if most is not None and self._running >= most:
            return ()
        free = [slot for slot in slots if slot not in self._held]
        taken: list[int] = []
        for left, slot in zip(range(len(free), 0, -1), free, strict=True):
            if len(taken) + left < want or len(taken) >= max(want, wider):
                break
            if self._lock(slot):
                taken.append(slot)
        if len(taken) >= want:
            self._held.update(taken)
            self._running += 1
            return tuple(taken)
        for slot in taken:
            self._unlock(slot)
        return ()

    def give(self, slots: tuple[int, ...]) -> None:
        with self.changed:
            for slot in slots:
                self._unlock(slot)
            self._held.difference_update(slots)
            self._running -= 1
            self.changed.notify_all()

    def holder(self, slots: tuple[int, ...]) -> int | None:
        """The pid of another process that holds one of the slots. ``changed`` must be held."""
        if self.path is None or self.broken:
            return None
        for slot in slots:
            if slot not in self._held:
                # struct flock of 64-bit Linux: type, whence, start, length, pid.
                asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, slot, 1, 0)
                kind, _, _, _, pid = struct.unpack(
                    "hhqqi4x", fcntl.fcntl(self._fd, fcntl.F_GETLK, asked)
                )
                if kind != fcntl.F_UNLCK:
                    return int(pid)
        return None

    def _lock(self, slot: int) -> bool:
        if self.path is None or self.broken:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            self.broken = f"{self.path}: cannot be locked ({error.strerror})"
            events.emit(
                events.NOTE, text=f"builds are bounded in this process alone: {self.broken}"
            )
        return True

    def _unlock(self, slot: int) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError) if self.broken else contextlib.nullcontext():
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)


# This process's budgets. There is one, unless settings change while it runs.
_lock = threading.Lock()
_budgets: dict[tuple[object, ...], Budget] = {}
_tables: dict[tuple[int, int], _Table] = {}
_alone = _Table(None, -1)
_hooked = False


def shared() -> Budget:
    """The budget of this user on this host, by the settings in force."""
    global _hooked
    key = (settings.runtime_dir, settings.tmpdir, settings.memory)
    with _lock:
        if not _hooked:
            os.register_at_fork(after_in_child=_after_fork)
            _hooked = True
        if key not in _budgets:
            table, refused = _find_table()
            _budgets[key] = Budget(measure(), table, refused)
        return _budgets[key]


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for table in (*_tables.values(), _alone):
        table.reset()


def _find_table() -> tuple[_Table, tuple[str, ...]]:
    """The first usable place, and why each one before it was refused."""
    uid = os.geteuid()
    chosen = settings.runtime_dir
    places = [chosen] if chosen else []
    places += [f"/dev/shm/opkiln-{uid}", os.path.join(settings.tmpdir or "/tmp", f"opkiln-{uid}")]
    refused: list[str] = []
    for place in places:
        try:
            table = _open_table(place, uid)
        except OSError as error:
            refused.append(f"{place}: {error.strerror}")
            if place == chosen:
                events.emit(events.NOTE, text=f"OPKILN_RUNTIME_DIR is not used: {refused[-1]}")
        else:
            return table, tuple(refused)
    text = "builds are bounded in this process alone: " + "; ".join(refused)
    events.emit(events.NOTE, text=text)
    return _alone, tuple(refused)


def _open_table(place: str, uid: int) -> _Table:
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)
    # What is checked is what was opened: a name in /dev/shm or /tmp may be anybody's, and may
    # change hands between a check and a use.
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_private(os.fstat(directory), uid)
        with contextlib.suppress(FileNotFoundError):
            # Before the file is opened: were it open already, closing the second descriptor
            # would drop every lock of this process.
            status = os.stat("slots", dir_fd=directory, follow_symlinks=False)
            known = _tables.get(_identity(status))
            if known is not None:
                return known
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open("slots", flags, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    table = _Table(os.path.join(place, "slots"), fd)
    return _tables.setdefault(_identity(os.fstat(fd)), table)


def _require_private(status: os.stat_result, uid: int) -> None:
    if status.st_uid != uid:
        raise PermissionError(errno.EPERM, f"it belongs to uid {status.st_uid}, not to {uid}")
    if stat.S_IMODE(status.st_mode) & 0o022:
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        raise PermissionError(errno.EPERM, f"others may write to it (mode {mode})")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
