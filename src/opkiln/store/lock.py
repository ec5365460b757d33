"""The build lock: one process builds an entry, the others wait and report whom they wait for.

It only saves work. Correctness does not depend on it: on a file system with broken locks, an entry
may be compiled twice, but never loaded wrongly. It is a POSIX record lock. The kernel releases it
when its holder dies, for whatever reason, and a forked child does not inherit it. Such a lock does
not exclude threads of the same process, so those queue on a ``threading.Lock`` first.

A builder writes a token into the lock file. If it fails, it leaves a record of the failure under
that token. The processes that waited for this attempt raise the same error and do not repeat the
build. Processes that come later try again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from typing import NamedTuple

from opkiln import errors
from opkiln.digest import read_file
from opkiln.trust import make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeVar

    T = TypeVar("T")

_HELD = (errno.EAGAIN, errno.EACCES)
_threads: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def _after_fork() -> None:
    # The child has no other threads, so their locks mean nothing to it.
    global _guard
    _guard = threading.Lock()
    _threads.clear()


os.register_at_fork(after_in_child=_after_fork)


class Holder(NamedTuple):
    """The process that builds; waiting processes show it."""

    pid: int
    host: str
    token: str


class Waiting(NamedTuple):
    """The argument of the ``waiting`` callback."""

    holder: Holder | None
    seconds: float


class Turn:
    """The right to build."""

    def __init__(self, failures: str, token: str) -> None:
        self._failures = failures
        self._token = token

    def fail(self, error: errors.OpkilnError) -> None:
        """Record this error for the processes that wait for this attempt."""
        record = {
            "token": self._token,
            "kind": type(error).__name__,
            "what": error.what,
            "why": error.why,
            "hint": error.hint,
        }
        temporary = f"{self._failures}.{secrets.token_hex(6)}"
        try:
            make_private(os.path.dirname(self._failures))
            with open(temporary, "x") as file:
                json.dump(record, file)
            os.replace(temporary, self._failures)
        except OSError:
            # Without the record, they will compile it themselves and see the same error.
            with suppress(OSError):
                os.unlink(temporary)


@contextmanager
def turn(
    root: str,
    name: str,
    arrived: Callable[[], T | None],
    waiting: Callable[[Waiting], None],
) -> Iterator[Turn | T]:
    """Wait until it is our turn to build ``name``, or until ``arrived()`` finds it built.

    Raises the error of a builder that failed while we waited for it.
    """
    path = os.path.join(root, "locks", name)
    failures = os.path.join(root, "failures", name + ".json")
    began = time.monotonic()
    with _guard:
        thread_lock = _threads.setdefault(path, threading.Lock())
    while not thread_lock.acquire(timeout=1.0):
        waiting(Waiting(Holder(os.getpid(), _host(), ""), time.monotonic() - began))
    try:
        fd = _open(path)
        try:
            awaited: set[str] = set()
            pause = 0.01
            while not _try_lock(fd):
                holder = _read_holder(fd)
                if holder is not None:
                    awaited.add(holder.token)
                if (found := arrived()) is not None:
                    yield found
                    return
                waiting(Waiting(holder, time.monotonic() - began))
                time.sleep(pause)
                pause = min(pause * 1.5, 0.25)
            if (found := arrived()) is not None:
                yield found
                return
            if awaited:
                _raise_failure(failures, awaited)
            token = secrets.token_hex(8)
            _write_holder(fd, Holder(os.getpid(), _host(), token))
            try:
                yield Turn(failures, token)
            finally:
                # The next holder has the lock for a moment before it writes its own token. If ours
                # were still there, a waiter could take it for the new holder's, and then raise our
                # old failure.
                _clear_holder(fd)
        finally:
            if fd >= 0:
                os.close(fd)  # releases the lock
    finally:
        thread_lock.release()


def _open(path: str) -> int:
    """The lock file's descriptor; -1 if it cannot be opened. Then nobody waits."""
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
        return Holder(int(record["pid"]), str(record["host"]), str(record["token"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # it has the lock, but has not written its name yet


def _write_holder(fd: int, holder: Holder) -> None:
    if fd < 0:
        return
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder._asdict()).encode(), 0)
    except OSError:
        return  # a full disk: waiters see no name, and the build will report the problem


def _clear_holder(fd: int) -> None:
    if fd < 0:
        return
    try:
        os.ftruncate(fd, 0)
    except OSError:
        return  # a stale handle: nobody else can read this file any more


def _raise_failure(path: str, awaited: set[str]) -> None:
    try:
        record = json.loads(read_file(path))
        token, kind = record["token"], getattr(errors, record["kind"])
        if token not in awaited or not issubclass(kind, errors.OpkilnError):
            return
        error = kind(record["what"], why=record["why"], hint=record["hint"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    raise error


def _host() -> str:
    return os.uname().nodename
