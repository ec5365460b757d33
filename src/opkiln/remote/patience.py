"""How long a tier may be silent.

A host that is down or behind a firewall that drops packets must not hold up a load. So a request
runs in a thread of its own, and whoever waits for it gives up after 2.5 seconds without an answer.
The time-outs of sockets are not enough: they do not cover the look-up of the host's name, and the
libraries for buckets repeat what failed.
"""

from __future__ import annotations

import contextvars
import threading
import time
from typing import NamedTuple

from opkiln.remote.tier import Unreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from opkiln.remote.tier import Pulse

    T = TypeVar("T")

SOCKET = 60.0  # seconds that an abandoned request may still last, for itself


class Patience(NamedTuple):
    """How many seconds somebody waits."""

    first: float  # for the first sign of life
    stall: float  # between two of them: buckets take a file in one piece


# To import a bucket's library and have it look for a login. It is mostly this machine's own work,
# seconds where others compile at the same time, and the libraries limit what they ask for.
OPEN = Patience(60.0, 60.0)
LOAD = Patience(2.5, 10.0)  # a load can do without the tier
COMMAND = Patience(30.0, 120.0)  # a person has asked for just this


class Silent(Unreachable):
    """Nothing was heard for too long."""


class _Attempt:
    def __init__(self, given: Patience) -> None:
        self.stall = given.stall
        self.deadline = time.monotonic() + given.first
        self.over = threading.Event()
        self.abandoned = False
        self.lock = threading.Lock()
        self.result: object = None
        self.error: BaseException | None = None

    def pulse(self) -> None:
        """The other side has said something."""
        with self.lock:
            if self.abandoned:
                raise Silent("nobody waits for it any more")
            self.deadline = time.monotonic() + self.stall

    def is_late(self) -> bool:
        """Give up, if it is time for that."""
        with self.lock:
            self.abandoned = not self.over.is_set() and time.monotonic() >= self.deadline
            return self.abandoned

    def run(self, task: Callable[[Pulse], T]) -> None:
        try:
            self.result = task(self.pulse)
        except BaseException as error:  # it is raised where the result is waited for
            self.error = error
        finally:
            self.over.set()


def patiently(task: Callable[[Pulse], T], given: Patience = LOAD) -> T:
    """The result of ``task(pulse)``. Raises what it raises, and Silent if it says nothing for too
    long. Then it goes on in its thread until the next ``pulse()``, which raises."""
    attempt = _Attempt(given)
    began = time.monotonic()
    threading.Thread(
        target=contextvars.copy_context().run, args=(attempt.run, task), daemon=True
    ).start()
    while not attempt.over.wait(max(0.0, attempt.deadline - time.monotonic())):
        if attempt.is_late():
            raise Silent(f"no answer in {time.monotonic() - began:.1f} s")
    if attempt.error is not None:
        raise attempt.error
    return attempt.result  # type: ignore[return-value]
