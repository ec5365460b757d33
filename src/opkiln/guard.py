"""The builder's side of the watchdog: starts it and tells it what to clean up.

``process.py`` owns the one Guard of a process and starts the watchdog for it. ``watchdog.py`` is
the script that then runs.
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

from opkiln.errors import BuildCancelled, BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_inside: set[tuple[str, int]] = set()  # (what, thread)
os.register_at_fork(after_in_child=_inside.clear)


@contextlib.contextmanager
def once_per_thread(what: str) -> Iterator[None]:
    """Within the block, this thread cannot enter another block for the same thing.

    Only a signal handler that loads an op would try that. It would wait for ever for a lock that
    its own thread holds, since the code that it interrupted cannot go on. Raises BuildError.
    """
    ours = (what, threading.get_ident())
    if ours in _inside:
        raise BuildError(
            f"an op cannot be loaded while the same thread {what}",
            why="a signal handler has interrupted that, and it cannot go on until the handler ends",
            hint="load the op before, or set a flag in the handler and load the op after it",
        )
    _inside.add(ours)
    try:
        yield
    finally:
        _inside.discard(ours)


class Child(Protocol):
    """The part of ``subprocess.Popen`` that is used here."""

    returncode: int

    def poll(self) -> int | None: ...


class Guard:
    """Starts the watchdog when it is first needed, and tells it what to clean up."""

    def __init__(self, start: Callable[[int, str], Child]) -> None:
        self.start = start  # (socket, token) -> the watchdog; raises OSError
        self.lock = threading.Lock()
        self.hooked = False
        self.exiting = False
        self._forget()

    def _forget(self) -> None:
        self.token = ""
        self.child: Child | None = None
        self.link: socket.socket | None = None
        self.scratch: set[bytes] = set()
        self.running = 0

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        # Not an RLock: a handler that came in between would start a second watchdog, and lose one
        # of them. A watchdog whose socket is closed kills what the other one watches.
        with once_per_thread("talks to its watchdog"), self.lock:
            yield

    @contextlib.contextmanager
    def watching(self) -> Iterator[str]:
        """The token for a child that is about to be started. Makes sure that the watchdog runs."""
        with self._alone():
            self._ensure()
            self.running += 1
            token = self.token
        try:
            yield token
        finally:
            with self._alone():
                self.running -= 1

    def register(self, path: bytes) -> None:
        with self._alone():
            self._ensure()
            self.scratch.add(path)
            if not self._send(b"+" + path):
                self._ensure()  # the watchdog has just died; start another and tell it everything

    def release(self, path: bytes) -> None:
        with self._alone():
            if path in self.scratch:
                self.scratch.remove(path)
                self._send(b"-" + path)

    def _ensure(self) -> None:
        if self.exiting:
            raise BuildCancelled("the build was cancelled: this process is exiting")
        if self.child is not None and self.child.poll() is None:
            return
        if not self.hooked:
            os.register_at_fork(after_in_child=self._after_fork)
            atexit.register(self._at_exit)
            self.hooked = True
        self.token = self.token or os.urandom(16).hex()
        if self.link is not None:
            self.link.close()
        # A packet socket has three advantages over a pipe. Messages keep their boundaries, whatever
        # bytes a path contains. A kill never leaves half a path. And writing to a dead watchdog is
        # an error, even if the program has restored SIGPIPE's default, which would kill it.
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                # There is no need to wait until it runs. If this process dies before that, the
                # watchdog finds the socket closed and its parent gone, and acts.
                self.child = self.start(theirs.fileno(), self.token)
            except OSError as error:
                # An embedded interpreter may have no executable. Builds work without the watchdog.
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
        # This runs in the child. A thread that does not exist here may hold the lock. The watchdog
        # is the parent's. If the child kept the socket open, the watchdog could not notice the
        # parent's end by it.
        self.lock = threading.Lock()
        if self.link is not None:
            self.link.close()
        if self.child is not None:
            self.child.returncode = 0  # it is not this process's child, so never wait for it
        self._forget()

    def _at_exit(self) -> None:
        with self.lock:
            self.exiting = True
            if self.child is None or self.link is None:
                return
            if not self.running and not self.scratch:
                self._send(b"quit")
            self.link.close()
            # Without "quit", daemon threads are still building, and the watchdog kills their
            # children now. Wait for it, so that none is alive after this process has exited.
            deadline = time.monotonic() + 5
            while self.child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
