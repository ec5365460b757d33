"""Tests that hold a time against a promise, on machines where others are at work, too.

A busy machine makes everything slower. So a time that has passed is a failure only when the machine
was not too busy for it, and that is measured, not assumed.
"""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_BURST = 0.05  # seconds of CPU time


def slowdown() -> float:
    """How many times longer things take now than alone: 1 on a quiet machine.

    The larger of what a burst of work on one CPU shows, and of the processes that are ready to run
    for each CPU.
    """
    began, used = time.monotonic(), time.process_time()
    while time.process_time() - used < _BURST:
        pass
    waited = (time.monotonic() - began) / _BURST
    with open("/proc/loadavg") as file:
        ready = int(file.read().split()[3].partition("/")[0])
    return max(1.0, waited, ready / len(os.sched_getaffinity(0)))


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether something comes true in so many seconds of a quiet machine."""
    began, allowed = time.monotonic(), seconds
    while not condition():
        passed = time.monotonic() - began
        if passed > allowed:
            allowed = max(allowed, seconds * slowdown())
            if passed > allowed:
                return False
        time.sleep(0.01)
    return True


def needs_quiet(test: Callable[..., None]) -> Callable[..., None]:
    """Repeats a test that failed while the machine was busy, up to four times.

    For what cannot wait longer, such as a sample that has to be taken in time.
    """

    @functools.wraps(test)
    def repeated(*arguments: Any, **named: Any) -> None:
        for left in range(4, -1, -1):
            try:
                test(*arguments, **named)
            except AssertionError:
                if not left or slowdown() < 1.5:
                    raise
            else:
                return

    return repeated
