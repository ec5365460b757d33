"""This process's side of its watchdog: when it is started and what it is told.

``process.py`` owns the one Guard of a process and starts the watchdog for it; ``watchdog.py`` is
what runs there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import warnings
from typing import TYPE_CHECKING, Protocol

from opkiln.errors import BuildCancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Child(Protocol):
    """What is needed of a ``subprocess.Popen``."""

    returncode: int

    def poll(self) -> int | None: ...


class Guard:
    """Starts the watchdog when it is first needed and tells it what there is to clean up."""

    def __init__(self, start: Callable[[int, str], Child]) -> None:
        self.start = start  # (socket, token) -> the watchdog; raises OSError
        self.lock = threading.Lock()
        self.hooked = False
        self.leaving = False
        self._forget()

    def _forget(self) -> None:
        self.token = ""
        self.child: Child | None = None
        self.link: socket.socket | None = None
        self.scratch: set[bytes] = set()
        self.running = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[str]:
        """The token for a child that is about to be started. The watchdog comes before it."""
        with self.lock:
            self._ensure()
            self.running += 1
            token = self.token
        try:
            yield token
        finally:
            with self.lock:
                self.running -= 1

    def register(self, path: bytes) -> None:
        with self.lock:
            self._ensure()
            self.scratch.add(path)
            if not self._send(b"+" + path):
                self._ensure()  # it died just now; the next one is told everything

    def release(self, path: bytes) -> None:
        with self.lock:
            if path in self.scratch:
                self.scratch.remove(path)
                self._send(b"-" + path)

    def _ensure(self) -> None:
        if self.leaving:
            raise BuildCancelled("nothing more is built: this process is exiting")
        if self.child is not None and self.child.poll() is None:
            return
        if not self.hooked:
            os.register_at_fork(after_in_child=self._after_fork)
            atexit.register(self._at_exit)
            self.hooked = True
        self.token = self.token or os.urandom(16).hex()
        if self.link is not None:
            self.link.close()
        # A packet socket and not a pipe: messages keep their bounds whatever bytes a path holds,
        # one cut off by a kill is not half a path, and writing to a dead watchdog is an error
        # even in a program that has given SIGPIPE its deadly default back.
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                # Not waited for: if this process dies before the watchdog is up, it finds the
                # socket closed and its parent gone, and acts.
                self.child = self.start(theirs.fileno(), self.token)
            except OSError as error:
                # An embedded interpreter may have no executable. Builds work all the same.
                warnings.warn(
                    "compilers started here will outlive this process if it is killed: "
                    f"their watchdog could not be started ({error})",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return
        for path in self.scratch:
            self._send(b"+" + path)

    def _send(self, message: bytes) -> bool:
        if self.link is None:
            return False
        try:
            self.link.send(message, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _after_fork(self) -> None:
        # In the child: the lock may be held by a thread that does not exist here, the watchdog is
        # the parent's, and holding the socket would hide the parent's end from it.
        self.lock = threading.Lock()
        if self.link is not None:
            self.link.close()
        if self.child is not None:
            self.child.returncode = 0  # not this process's child: never to be waited for
        self._forget()

    def _at_exit(self) -> None:
        with self.lock:
            self.leaving = True
            if self.child is None or self.link is None:
                return
            if not self.running and not self.scratch:
                self._send(b"quit")
            self.link.close()
            # Otherwise daemon threads are still building, and the watchdog ends their children
            # now. Waiting for it means that none is alive once this process has exited.
            deadline = time.monotonic() + 5
            while self.child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
