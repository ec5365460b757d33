"""The build lock: one process builds an entry, the others wait and say for which process.

It only saves work. Correctness does not depend on it: on a file system with broken locks, an entry
may be compiled twice, but never loaded wrongly. It is a POSIX record lock. The kernel releases it
when its holder dies, for whatever reason, and a forked child does not inherit it. Such a lock does
not exclude threads of the same process, so those queue on a ``threading.Lock`` first.

A builder writes a token into the lock file, and how many steps it has finished. If it fails, it
leaves a record of the failure under that token. The processes that waited for this attempt raise
the same error and do not repeat the build. Processes that come later try again.

A wait ends after a limit. It counts from the start of the waiting load, and again from each step
that the builder finishes: a long build is not a hang. It does not count again from a new builder,
so the limits of those who wait do not add up. A builder that is stopped (SIGSTOP, Ctrl-Z, a
debugger) is passed after a few seconds: those who wait for it take turns at a second lock, and one
of them builds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple, TypeVar

from opkiln import errors
from opkiln.base.digest import read_file, write_private
from opkiln.base.trust import make_private
from opkiln.run.child import is_stopped

T = TypeVar("T")

_HELD = (errno.EAGAIN, errno.EACCES)
# Seconds beyond the limit of a wait, so that a builder with the same limit that started a moment
# later can say what was too slow.
_GRACE = 1.0
# Seconds between two looks: the first pause and the longest. In between, a pause is a fraction of
# the time that was waited, so that the end is never noticed much too late.
_FIRST_PAUSE, _LAST_PAUSE, _PART = 0.01, 0.25, 0.02
_PASSED_AFTER = 5.0  # seconds that a builder may be stopped
_LAST_LOCK = 9  # so many builders of one entry may be stopped at once


class _Local:
    """The threads of this process that want the same turn."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # noqa: TID251 - a forked child forgets it, below
        # The process that builds: this one, or the one that a thread of this one waits for.
        self.holder: Holder | None = None


_threads: dict[str, _Local] = {}
# The child has no other threads, so their locks mean nothing to it.
os.register_at_fork(after_in_child=_threads.clear)


class Holder(NamedTuple):
    """The process that builds; waiting processes show it."""

    pid: int
    host: str
    token: str
    steps: int = 0  # how many steps of the build it has finished


class Waiting(NamedTuple):
    """What a waiting process knows: the argument of the ``waiting`` callback."""

    holder: Holder | None
    seconds: float
    stopped: bool = False  # whether the holder is stopped

    def event_data(self, what: str) -> dict[str, Any]:
        """The data of an event that says for which process and for ``what`` we wait."""
        pid, host = (self.holder.pid, self.holder.host) if self.holder is not None else (0, "")
        what = f"{what}, but it is stopped" if self.stopped else what
        return {"pid": pid, "host": host, "seconds": self.seconds, "what": what}


class Turn:
    """The right to build."""

    def __init__(self, fd: int, local: _Local, failures: str, since: float) -> None:
        self.since = since  # when the time of the first step began to count
        self._fd = fd
        self._local = local
        self._failures = failures
        self._holder = local.holder = Holder(os.getpid(), _host(), secrets.token_hex(8))
        _write_holder(fd, self._holder)

    def advance(self) -> None:
        """Tell the processes that wait that a step is finished."""
        holder = self._holder._replace(steps=self._holder.steps + 1)
        self._holder = self._local.holder = holder
        _write_holder(self._fd, holder)

    def end(self) -> None:
        """Give the turn back."""
        # The next holder has the lock for a moment before it writes its own token. If ours were
        # still there, a waiter could take it for the new holder's, and then raise our old failure.
        _write_holder(self._fd, None)
        self._local.holder = None

    def fail(self, error: errors.OpkilnError, limit: float | None = None) -> None:
        """Record this error for the processes that wait for this attempt. If it is a time-out, only
        processes with no higher ``limit`` raise it."""
        record = {
            "token": self._holder.token,
            "kind": type(error).__name__,
            "what": error.what,
            "why": error.why,
            "hint": error.hint,
            "limit": limit,
        }
        with suppress(OSError):  # without it, they compile it themselves and see the same error
            write_private(self._failures, json.dumps(record).encode())


@contextmanager
def turn(
    root: str,
    name: str,
    arrived: Callable[[], T | None],
    waiting: Callable[[Waiting], None],
    *,
    what: str,
    limit: float,
    since: float | None = None,
) -> Iterator[Turn | T]:
    """Wait until it is our turn to build ``name``, or until ``arrived()`` finds it built.

    Raises the error of a builder that failed while we waited for it. Raises BuildTimeout, which
    calls the build ``what``, after ``limit`` seconds in which the builder finished no step. They
    count from ``since`` (``time.monotonic()``; default: now).
    """
    path = os.path.join(root, "locks", name)
    failures = os.path.join(root, "failures", name + ".json")
    wait = _Wait(failures, waiting, what, limit, since)
    local = _threads.setdefault(path, _Local())  # atomic; a signal handler may do it, too
    while not local.lock.acquire(timeout=0.25):
        wait.keep_waiting(local.holder or Holder(os.getpid(), _host(), ""), pause=False)
    try:
        for number in count(1):
            # Two locks of one process must not be of one file: closing one would release both.
            fd = _open(path if number == 1 else f"{path}.{number}")
            try:
                found, passed = _await(fd, local, arrived, wait, last=number == _LAST_LOCK)
                if found is not None:
                    yield found
                    return
                if passed:
                    continue
                wait.raise_failure()
                ours = Turn(fd, local, failures, wait.turn_began())
                try:
                    yield ours
                finally:
                    ours.end()
                return
            finally:
                if fd >= 0:
                    os.close(fd)  # releases the lock
    finally:
        local.holder = None
        local.lock.release()


class _Wait:
    """One wait for other processes, and its limit."""

    def __init__(
        self,
        failures: str,
        waiting: Callable[[Waiting], None],
        what: str,
        limit: float,
        since: float | None,
    ) -> None:
        self._failures = failures
        self._waiting = waiting
        self._what = what
        self._limit = limit
        self._began = time.monotonic()
        self._advanced = self._began if since is None else since
        self._steps: tuple[str, int] | None = None  # the token and steps that were seen last
        self._stopped_since: float | None = None
        self._awaited: set[str] = set()
        self._waited = False

    def keep_waiting(self, holder: Holder | None, *, pause: bool = True) -> bool:
        """Report the wait, and wait a moment. Returns False if the holder is to be passed. Raises
        BuildTimeout at the limit, and the error of a builder that failed meanwhile."""
        now = time.monotonic()
        stopped = False
        self._waited = True
        if holder is not None:
            if holder.token:
                self._awaited.add(holder.token)
            seen = (holder.token, holder.steps)
            if holder.steps and seen != self._steps:
                self._advanced = now
            self._steps = seen
            stopped = holder.host == _host() and is_stopped(holder.pid)
        self.raise_failure()
        self._waiting(Waiting(holder, now - self._began, stopped))
        if now - self._advanced > self._limit + _GRACE:
            raise self._too_long(holder, stopped)
        self._stopped_since = (self._stopped_since or now) if stopped else None
        if self._stopped_since is not None and now - self._stopped_since > _PASSED_AFTER:
            self._stopped_since = None
            return False
        if pause:
            time.sleep(min(max(_FIRST_PAUSE, _PART * (now - self._began)), _LAST_PAUSE))
        return True

    def turn_began(self) -> float:
        """The time at which our turn began: now, or the start of the load if we did not wait."""
        return time.monotonic() if self._waited else self._advanced

    def raise_failure(self) -> None:
        """Raise the error of a builder that we waited for, if it left one."""
        if self._awaited:
            _raise_failure(self._failures, self._awaited, self._limit)

    def _too_long(self, holder: Holder | None, stopped: bool) -> errors.BuildTimeout:
        whom = "another process"
        if holder is not None and holder.pid:
            whom = f"pid {holder.pid} on host {holder.host}"
        why = f"it finished no step in the last {self._limit:g} s (OPKILN_BUILD_TIMEOUT)"
        hint = f"OPKILN_BUILD_TIMEOUT={max(60, int(self._limit) * 2)}"
        if holder is not None and holder.pid and holder.host == _host():
            hint = shlex.join(["ps", "-o", "pid,stat,etime,args", "-p", str(holder.pid)])
            if stopped:
                why, hint = f"it is stopped; {why}", f"kill -CONT {holder.pid}"
        return errors.BuildTimeout(
            f"gave up waiting for {whom}, which builds {self._what}", why=why, hint=hint
        )


def _await(
    fd: int, local: _Local, arrived: Callable[[], T | None], wait: _Wait, *, last: bool
) -> tuple[T | None, bool]:
    """Wait for the lock: (what has arrived meanwhile, whether to try the next lock)."""
    while not _try_lock(fd):
        holder = local.holder = _read_holder(fd)
        if (found := arrived()) is not None:
            return found, False
        if not wait.keep_waiting(holder) and not last:
            return None, True
    return arrived(), False


def _open(path: str) -> int:
    """The lock file's descriptor; -1 if it cannot be opened. Then there is no wait."""
    try:
        make_private(os.path.dirname(path))
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return -1


def _try_lock(fd: int) -> bool:
    if fd < 0:
        return True
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Waiting does not help with any other error (no locks on this file system, a stale handle).
        # So it is our turn. At worst another process builds at the same time.
        return error.errno not in _HELD
    return True


def _read_holder(fd: int) -> Holder | None:
    try:
        record = json.loads(os.pread(fd, 4096, 0))
        pid, steps = int(record["pid"]), int(record["steps"])
        return Holder(pid, str(record["host"]), str(record["token"]), steps)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # it has the lock, but has not written its name yet


def _write_holder(fd: int, holder: Holder | None) -> None:
    """Write the holder of the turn; with None, that nobody has it."""
    # It fails if there is no lock file, on a full disk (waiters see no name, and the build will
    # report the problem), and with a stale handle (nobody else can read this file any more).
    with suppress(OSError):
        if holder is None or not holder.steps:
            os.ftruncate(fd, 0)  # a killed holder's text; later, ours only becomes longer
        if holder is not None:
            os.pwrite(fd, json.dumps(holder._asdict()).encode(), 0)


def _raise_failure(path: str, awaited: set[str], limit: float) -> None:
    try:
        record = json.loads(read_file(path))
        token, kind = record["token"], getattr(errors, record["kind"])
        if token not in awaited or not issubclass(kind, errors.OpkilnError):
            return
        if kind is errors.BuildTimeout and limit > float(record["limit"] or 0):
            return  # we have more patience, so we try for ourselves
        error = kind(record["what"], why=record["why"], hint=record["hint"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    raise error


def _host() -> str:
    return os.uname().nodename
