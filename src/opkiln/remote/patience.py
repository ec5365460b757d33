"""Time limits for remote tiers.

A tier that is down, slow or hostile must not hold up a load. So a request runs in a thread of its
own and has one deadline for everything: the look-up of a name, connections, TLS, logins, redirects,
headers and body. The time-outs of sockets are not enough: each byte restarts them, they do not
cover the look-up, and the libraries for buckets repeat failed requests.

The waiting thread gives up at the deadline. The request's socket is shut down then, so that the
request's thread ends, too.
"""

from __future__ import annotations

import contextvars
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from math import inf
from typing import NamedTuple, TypeVar

from opkiln.base import forks

T = TypeVar("T")
Told = Callable[[int], None] | None

SLOWEST = 64 << 10  # bytes of a body that extend the deadline by a second


class Patience(NamedTuple):
    """How long to wait, in seconds."""

    first: float  # for the first answer
    whole: float  # for the whole request; the bytes of a body extend it
    until: float = inf  # when it must be over in any case (``time.monotonic()``)
    told: Told = None  # called with the size of each piece of a body, never after the deadline


# For importing a bucket's library and finding its login. That is mostly work of this machine, which
# takes seconds while others compile. The libraries limit the requests that they make.
OPEN = Patience(60.0, 60.0)
LOAD = Patience(2.5, 10.0)  # a load can do without the tier
COMMAND = Patience(30.0, 120.0)  # a person has asked for just this


class Deadline:
    """When a request must be over. The bytes of a body extend it, but never beyond the whole time
    from now: bytes that came fast do not pay for a later stall."""

    def __init__(self, given: Patience) -> None:
        now = time.monotonic()
        self._given = given
        self._first, self._end = now + given.first, now + given.whole
        self._expired = False
        self._socket: socket.socket | None = None
        self._lock = forks.lock()

    @property
    def left(self) -> float:
        """How many seconds are left."""
        end = min(self._first, self._end, self._given.until)
        return 0.0 if self._expired else max(0.0, end - time.monotonic())

    def hear(self, size: int = 0) -> None:
        """Note an answer, or ``size`` bytes of a body that were received or will be sent. Raises
        TimeoutError if nobody waits any more."""
        with self._lock:
            self._require()
            self._first = inf
            self._end = min(self._end + size / SLOWEST, time.monotonic() + self._given.whole)
            if size and self._given.told is not None:
                self._given.told(size)

    def guard(self, connected: socket.socket | None) -> None:
        """Shut this socket down at the deadline, and no other. Raises TimeoutError if nobody waits
        any more."""
        with self._lock:
            self._require()
            self._socket = connected

    def _require(self) -> None:
        if self._expired:
            raise TimeoutError("nobody waits for it any more")

    def expire(self) -> bool:
        """Give up if the time is over. Returns whether it is."""
        with self._lock:
            self._expired = not self.left
            if self._expired and self._socket is not None:
                with suppress(OSError):  # it is closed already
                    # This is not the method of a TLS socket: another thread reads from that now.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            return self._expired


def run_with_deadline(task: Callable[[Deadline], T], given: Patience = LOAD) -> T:
    """The result of ``task(deadline)``. Raises its errors, and TimeoutError at the deadline. Then
    the task goes on in its thread until it next calls the deadline, which raises."""
    deadline, began = Deadline(given), time.monotonic()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(task(deadline))
        except BaseException as error:  # it is raised where the result is waited for
            outcome.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    expired = False
    while not (wait([outcome], deadline.left).done or expired):
        expired = deadline.expire()  # a socket that was shut down may still give something
    if expired or isinstance(outcome.exception(), TimeoutError):  # whoever noticed it first
        raise TimeoutError(f"no complete answer in {time.monotonic() - began:.1f} s")
    return outcome.result()
