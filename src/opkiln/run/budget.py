"""One budget of CPUs and memory for all builds of a user on a host.

A slot is a CPU. Processes share the slots through locks on one file in a node-local directory
(``slots.py`` describes the design). The memory is divided evenly among the slots. A step that
expects more than one slot's share takes several slots at once. It never holds some of them while
it waits for the rest.

The locks only protect the machine from too many compilers. If they are not available (no private
directory, a file system without locks), the budget applies to this process only, and a note says
so.

What the kernel grants (CPUs, a CPU quota, memory; cgroups v1 and v2) is read below a ``root``.
Tests pass one of their own. The limits of this process's group and of all its ancestors count: the
tightest one applies. In a container, the group's path may be the host's, which does not exist below
the mounted tree. Its ancestors are read anyway, up to the mount itself.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from opkiln.base import forks
from opkiln.base.trust import fault
from opkiln.errors import BuildCancelled, BuildTimeout
from opkiln.run import events, slots
from opkiln.settings import settings

# cgroups v1 writes "no limit" as the largest page-aligned number.
_UNLIMITED = 1 << 60


def cpu_quota(root: str = "/") -> float | None:
    """The CPU quota, in CPUs; None if there is no quota."""
    pairs = [text.partition(" ") for text in _values(root, "cpu.max", "")]
    for folder in _folders(root, "cpu"):
        period = _read(os.path.join(folder, "cpu.cfs_period_us"))
        pairs.append((_read(os.path.join(folder, "cpu.cfs_quota_us")), " ", period))
    # Without a quota it is "max" or -1.
    found = [int(quota) / int(period or "100000") for quota, _, period in pairs if quota.isdigit()]
    return min((value for value in found if value > 0), default=None)


def memory_limit(root: str = "/") -> int | None:
    """The memory limit in bytes; None if there is no limit."""
    texts = (*_values(root, "memory.max", ""), *_values(root, "memory.limit_in_bytes", "memory"))
    sizes = [int(text) for text in texts if text.isdigit()]
    return min((size for size in sizes if 0 < size < _UNLIMITED), default=None)


class Kills(NamedTuple):
    """How many processes the kernel has killed because memory ran out."""

    group: int  # in this process's control group
    machine: int


def out_of_memory_kills(root: str = "/") -> Kills:
    """The kernel's counts so far; 0 if it does not report one."""
    group = 0
    for name, controller in (("memory.events", ""), ("memory.oom_control", "memory")):
        group += _read_kills(next(_values(root, name, controller), ""))  # the innermost group's
    return Kills(group, _read_kills(_read(os.path.join(root, "proc/vmstat"))))


def _read_kills(text: str) -> int:
    """The number after ``oom_kill``, in a file with a name and a number on each line."""
    match = re.search(r"^oom_kill[ \t]+(\d+)\b", text, re.MULTILINE)
    return int(match[1]) if match else 0


def cpus(root: str = "/") -> frozenset[int] | None:
    """The CPUs that the whole group may run on; None if that is unknown."""
    texts = (
        *_values(root, "cpuset.cpus.effective", ""),
        *_values(root, "cpuset.effective_cpus", "cpuset"),
        *_values(root, "cpuset.cpus", "cpuset"),
    )
    # The innermost group's: its set is part of its parent's.
    return next(filter(None, map(_cpu_list, texts)), None)


def total_memory(root: str = "/") -> int:
    """Bytes of memory in the machine."""
    if match := re.search(
        r"^MemTotal:\s*(\d+)", _read(os.path.join(root, "proc/meminfo")), re.MULTILINE
    ):
        return int(match[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _values(root: str, name: str, controller: str) -> Iterator[str]:
    """The file's content in each folder that has it, innermost first. An empty ``controller`` means
    cgroups v2."""
    for folder in _folders(root, controller):
        text = _read(os.path.join(folder, name))
        if text:
            yield text


def _folders(root: str, controller: str) -> Iterator[str]:
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(","):
            continue
        # `..` stands for groups outside this namespace, which are not visible.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # v1 is usually mounted as `cpu,cpuacct`, with links `cpu` and `cpuacct`. A minimal system
        # may have only one of these names. v2 has none.
        for name in (names, controller):
            top = os.path.join(mount, name)
            if os.path.isdir(top):
                for depth in range(len(parts), -1, -1):
                    yield os.path.join(top, *parts[:depth])
                break


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""  # missing or unreadable: it tells us no limit


def _cpu_list(text: str) -> frozenset[int]:
    """The CPUs in the kernel's list format, such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


# Seconds between two attempts: the first pause, the longest, and the longest while another process
# is ahead in the queue.
_FIRST_PAUSE, _LAST_PAUSE, _LAST_PAUSE_BEHIND = 0.007, 0.05, 0.2
_FIRST_CALL, _NEXT_CALL = 0.2, 1.0  # seconds until the first ``waiting`` call, and between calls


class Limits(NamedTuple):
    """The CPUs and the memory to share, and where the numbers come from."""

    slots: tuple[int, ...]  # the CPUs this process may use
    memory: int  # bytes that all builds may take together
    share: int  # bytes that come with one slot
    cpus_from: str
    memory_from: str


class Description(NamedTuple):
    """A budget in numbers, for a report."""

    limits: Limits
    max_jobs: int | None
    where: str | None  # the lock file; None if the budget applies to this process only
    refused: tuple[str, ...]  # each place that was not used, and why


def measure(root: str = "/", affinity: Collection[int] | None = None) -> Limits:
    """The CPUs and memory that may be used: affinity, cgroups, ``OPKILN_MEMORY``."""
    own = sorted(os.sched_getaffinity(0) if affinity is None else affinity)
    quota = cpu_quota(root)
    cap = len(own) if quota is None else math.ceil(quota)
    # The memory belongs to the whole cgroup. Eight ranks, each pinned to 8 of 64 CPUs, share it. So
    # it is divided by the slots of all of them, not by those of this process.
    group = len((cpus(root) or frozenset()).union(own))
    sharers = group if quota is None else min(group, cap)
    if settings.memory is not None:
        memory, memory_from = int(settings.memory), "OPKILN_MEMORY"
    else:
        total, limit = total_memory(root), memory_limit(root)
        limited = limit is not None and limit < total
        memory = int(0.8 * (limit if limit is not None and limited else total))
        memory_from = "80% of the cgroup's limit" if limited else "80% of the machine's memory"
    limiting = quota is not None and cap < len(own)
    cpus_from = f"cgroup quota of {quota:g} CPUs" if limiting else "CPU affinity"
    return Limits(tuple(own[:cap]), memory, max(1, memory // sharers), cpus_from, memory_from)


class Budget:
    """Hands out slots. One object serves all threads; ``shared_budget()`` returns it."""

    def __init__(
        self, limits: Limits, table: slots.SlotTable, refused: tuple[str, ...] = ()
    ) -> None:
        self.limits = limits
        self._table = table
        self._refused = refused

    def slots_for(self, memory: int) -> int:
        """How many slots a step takes that expects to use this many bytes."""
        return min(len(self.limits.slots), max(1, math.ceil(memory / self.limits.share)))

    @contextlib.contextmanager
    def hold(
        self,
        *,
        memory: int = 0,
        threads: int = 1,
        cancelled: threading.Event | None = None,
        waiting: Callable[[int, float], None] | None = None,
        limit: float | None = None,
        since: float | None = None,
    ) -> Iterator[tuple[int, ...]]:
        """Hold slots for a step that expects ``memory`` bytes, until the block ends.

        A step may be able to use several threads, each with ``memory`` bytes. It gets slots for as
        many threads as are free at once: at least one, and at most ``MAX_JOBS``.

        While other processes hold the slots, ``waiting`` is called about once a second. It gets the
        pid of one of them (0 if it is in another pid namespace) and the seconds waited so far.
        Raises BuildCancelled if ``cancelled`` is set first, and BuildTimeout if no slot changed
        hands for ``limit`` seconds. They count from ``since`` (``time.monotonic()``; default: now).
        """
        want, most = self.slots_for(memory), settings.max_jobs
        wider = min(len(self.limits.slots), want * threads, max(want, most or want * threads))
        ask = slots.SlotRequest(self.limits.slots, want, wider, most, memory, self.limits.memory)
        taken, pid = self._await(ask, cancelled, waiting, limit, since), os.getpid()
        try:
            yield taken
        finally:
            # A child forked inside the block also gets here, but it does not have the locks.
            if os.getpid() == pid:
                with self._table.changed:
                    self._table.give(taken)

    def _await(
        self,
        ask: slots.SlotRequest,
        cancelled: threading.Event | None,
        waiting: Callable[[int, float], None] | None,
        limit: float | None,
        since: float | None,
    ) -> tuple[int, ...]:
        table = self._table
        taken: tuple[int, ...] = ()
        started, pause, call_at = time.monotonic(), _FIRST_PAUSE, _FIRST_CALL
        holders: tuple[object, ...] | None = None
        changed_at = 0.0 if since is None else since - started  # seconds after the start
        try:
            with table.changed:
                table.join(ask)
            while True:
                if cancelled is not None and cancelled.is_set():
                    raise BuildCancelled("the build was cancelled while it waited for a free CPU")
                holder = None
                with table.changed:
                    taken = table.take(ask)
                    if taken:
                        return taken
                    # A release in this process wakes us at once. For one in another process we
                    # poll. The pause is random, so that two processes that both want all slots do
                    # not collide forever.
                    longest = _LAST_PAUSE if table.is_next(ask) else _LAST_PAUSE_BEHIND
                    pause = min(pause * 1.5, longest)
                    table.changed.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311
                    waited = time.monotonic() - started
                    if waited >= call_at:
                        holder = table.holder(ask)
                        call_at = waited + _NEXT_CALL
                        before, holders = holders, table.holders(ask)
                        if before is not None and holders != before:
                            changed_at = waited
                    if limit is not None and waited - changed_at > limit:
                        raise _no_free_cpu(limit, table.holder(ask))
                if waiting is not None and holder is not None:
                    waiting(holder, waited)
        finally:
            if not taken:
                with table.changed:
                    table.leave(ask)

    def describe(self) -> Description:
        """The numbers in force now."""
        refused = self._refused + ((self._table.broken,) if self._table.broken else ())
        where = None if self._table.broken else self._table.path
        return Description(self.limits, settings.max_jobs, where, refused)


def _no_free_cpu(limit: float, holder: int | None) -> BuildTimeout:
    whom = f"pid {holder}" if holder else "another process"
    return BuildTimeout(
        f"gave up waiting for a free CPU: {whom} holds one or is next",
        why=f"no build step of this user on this host ended in {limit:g} s (OPKILN_BUILD_TIMEOUT)",
        hint=f"ps -o pid,stat,etime,args -p {holder}" if holder else "ps -o pid,stat,etime,args -x",
    )


# This process's budgets. There is only one, unless the settings change.
_lock = forks.lock()  # a signal handler may build, too
_budgets: dict[tuple[object, ...], Budget] = {}
_tables: dict[tuple[int, int], slots.SlotTable] = {}
_alone = slots.SlotTable(None, -1)


def shared_budget() -> Budget:
    """The budget of this user on this host, under the current settings."""
    key = (settings.runtime_dir, settings.tmpdir, settings.memory)
    with _lock:
        if key not in _budgets:
            table, refused = _find_table()
            _budgets[key] = Budget(measure(), table, refused)
        return _budgets[key]


def _after_fork() -> None:
    for table in (*_tables.values(), _alone):
        table.reset()


os.register_at_fork(after_in_child=_after_fork)


def _find_table() -> tuple[slots.SlotTable, tuple[str, ...]]:
    """The table in the first usable place, and why each earlier place was refused."""
    uid = os.geteuid()
    chosen = settings.runtime_dir
    places = [chosen] if chosen else []
    places += [f"/dev/shm/opkiln-{uid}", os.path.join(settings.tmpdir or "/tmp", f"opkiln-{uid}")]
    refused: list[str] = []
    for place in places:
        try:
            table = _open_table(place)
        except OSError as error:
            refused.append(f"{place}: {error.strerror}")
            if place == chosen:
                events.emit(events.NOTE, text=f"OPKILN_RUNTIME_DIR is not used: {refused[-1]}")
        else:
            return table, tuple(refused)
    text = "the build budget applies to this process only: " + "; ".join(refused)
    events.emit(events.NOTE, text=text)
    return _alone, tuple(refused)


def _open_table(place: str) -> slots.SlotTable:
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)
    # Check the opened directory, not its name: anybody may create a name in /dev/shm or /tmp, or
    # replace it between a check and a use.
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if reason := fault("it", os.fstat(directory)):
            raise PermissionError(errno.EPERM, reason)
        with contextlib.suppress(FileNotFoundError):
            # Look before opening the file. If this process already has it open, closing a second
            # descriptor would drop all of its locks.
            status = os.stat("slots", dir_fd=directory, follow_symlinks=False)
            known = _tables.get(_identity(status))
            if known is not None:
                return known
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open("slots", flags, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    table = slots.SlotTable(os.path.join(place, "slots"), fd)
    return _tables.setdefault(_identity(os.fstat(fd)), table)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
