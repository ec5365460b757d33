"""Signals as a program in the foreground has them, or as one under nohup.

Under nohup, SIGHUP is ignored; in the background of a script, SIGINT and SIGQUIT are. A process
passes that on to its children, so a test that sends one of them must first put the defaults back.
It does so in the child, or for the length of a block: the test run itself must survive its
terminal, as it was told to.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_START = """
import os, signal, sys
numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)
for number in numbers:
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
MORE
os.execvp(sys.argv[1], sys.argv[1:])
"""

# What to put before an argv.
FOREGROUND = (sys.executable, "-S", "-c", _START.replace("MORE", ""))
NOHUP = (sys.executable, "-S", "-c", _START.replace("MORE", "signal.signal(1, signal.SIG_IGN)"))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this process, for the length of the block."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
