"""Runs subprocesses, for all of opkiln. ``child.py`` handles one child.

Every child gets an argv (never a shell), the allow-listed environment of ``settings``, no standard
input, and its own session, so that it and its children can be killed as a group. A child of ``run``
also has ``OPKILN_BUILD_TOKEN`` in its environment, which all its descendants inherit. If this
process dies, for whatever reason, its watchdog (``watchdog.py``) kills every process with that
token and removes the scratch directories that were registered here. If the watchdog is killed with
it, compilers and linkers end by themselves (``building/observing/observer.c``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence

from opkiln.base import forks
from opkiln.errors import BuildCancelled, BuildError, BuildTimeout, ToolchainError
from opkiln.run import child
from opkiln.run.child import Completed
from opkiln.run.watchdog import MARKER
from opkiln.settings import child_environment, settings

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WATCHDOG = os.path.join(_PACKAGE, "run", "watchdog.py")


@contextlib.contextmanager
def watch_starts(listener: child.Listener) -> Iterator[None]:
    """Within the block, call ``listener`` with the argv of every program that any thread starts."""
    child.listeners.append(listener)
    try:
        yield
    finally:
        child.listeners.remove(listener)


def run(
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    tmpdir: str | None = None,
    timeout: float | None = None,
    since: float | None = None,
    cancelled: threading.Event | None = None,
    watch_files: bool = False,
) -> Completed:
    """Run a program to its end. A non-zero exit status is returned, not raised.

    When this returns or raises, the child is reaped and its whole process group is dead. Raises
    ToolchainError if the program cannot be started, BuildTimeout after ``timeout`` seconds
    (``OPKILN_BUILD_TIMEOUT`` if that is less), which count from ``since`` (``time.monotonic()``;
    default: now), and BuildCancelled if ``cancelled`` is set before the end. With ``watch_files``,
    raises InputError if the program or one of its children reads a FIFO that nobody writes to, or a
    device without an end.
    """
    environment = _environment(env, tmpdir)
    with once_per_thread("runs a program"), _guard.watch() as environment[MARKER]:
        if timeout is not None:
            timeout = min(timeout, settings.build_timeout)
            if since is not None and time.monotonic() - since > timeout:
                raise child.timeout_error(argv, timeout, "was not started within")
        if cancelled is not None and cancelled.is_set():
            raise child.cancel_error(argv)
        running = child.Child(argv, environment, cwd=cwd, watch_files=watch_files)
        return running.finish(timeout, since=since, cancelled=cancelled)


@contextlib.contextmanager
def start_waiting(argv: Sequence[str], *, tmpdir: str) -> Iterator[child.Child]:
    """Start a program that prepares itself and then waits (``Child.resume``). It is dead at the end
    of the block. Raises ToolchainError if it cannot be started."""
    environment = _environment(None, tmpdir)
    with _guard.watch() as environment[MARKER], contextlib.ExitStack() as stack:
        with once_per_thread("runs a program"):
            running = stack.enter_context(child.Child(argv, environment, waits=True))
        yield running


def capture(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 30.0,
    given: bytes | None = None,
) -> Completed:
    """Run a short probe without the watchdog, and keep its stderr apart. A non-zero exit status is
    returned, not raised. ``given`` is its standard input.

    Raises ToolchainError if the program cannot be started or does not end in time: within
    ``timeout`` seconds, or ``OPKILN_BUILD_TIMEOUT`` if that is less.
    """
    environment = _environment(env, None)
    try:
        with child.Child(argv, environment, split_stderr=True, waits=given is not None) as running:
            if given is not None:
                running.send(given, last=True)
            return running.finish(min(timeout, settings.build_timeout))
    except BuildTimeout as error:
        raise ToolchainError(error.what, why=error.why, hint=shlex.join(argv)) from None


def run_foreground(argv: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Run the user's program in the foreground, with our standard streams, to its end.

    Returns its exit status, or the negative number of the signal that ended it. Raises
    ToolchainError if it cannot be started. An interrupt from the terminal reaches both processes,
    and KeyboardInterrupt is raised here once the program has ended.
    """
    program = child.start(argv, env=dict(env))
    try:
        return program.wait()
    except KeyboardInterrupt:
        program.wait()
        raise


def python(*arguments: str, isolated: bool = False) -> tuple[str, ...]:
    """The argv of a Python child that imports nothing from the working directory. A file there may
    have any name: without ``-P``, ``-c`` and ``-m`` would run ``./torch.py`` for ``import torch``.
    An ``isolated`` child has only the standard library."""
    # An embedded interpreter has no executable, but often there is a Python next to its library.
    interpreter = sys.executable or os.path.join(sys.base_exec_prefix, "bin", "python3")
    return (interpreter, *(("-I", "-S") if isolated else ("-P",)), *arguments)


def python_code(code: str, *arguments: str) -> tuple[str, ...]:
    """The argv of a Python child that runs ``code``, which may import opkiln. ``sys`` is imported,
    and the arguments are in ``sys.argv[1:]``."""
    # opkiln's own directory comes last: it may be the working directory.
    start = f"import sys; sys.path.append({os.path.dirname(_PACKAGE)!r})\n{code}"
    return python("-c", start, *arguments)


def signal_name(returncode: int) -> str:
    """The signal that ended a process, by its negative exit status: ``SIGKILL``, ``signal 40``."""
    try:
        return signal.Signals(-returncode).name
    except ValueError:  # real-time signals have no names
        return f"signal {-returncode}"


def _environment(extra: Mapping[str, str] | None, tmpdir: str | None) -> dict[str, str]:
    # LC_ALL=C and not C.UTF-8: with C.UTF-8, compilers use Unicode quotation marks. Then the
    # messages would not match our patterns, and logs do not need them.
    environment = {**child_environment(), "LC_ALL": "C"}
    if place := tmpdir or settings.tmpdir:  # a compiler that only tells its version may write there
        environment["TMPDIR"] = os.path.abspath(place)
    return {**environment, **(extra or {})}


def make_scratch(root: str, prefix: str) -> str:
    """A new private directory. It is removed when this process ends, also if it is killed. Raises
    OSError."""
    path = os.path.abspath(f"{root}/opkiln-{prefix}-{os.urandom(8).hex()}")
    # The watchdog is told first. In the other order, a process killed in between would leave a
    # directory that nobody knows of.
    _guard.register(path)
    try:
        os.mkdir(path, 0o700)
    except OSError:
        _guard.release(path)
        raise
    return path


def remove_scratch(path: str) -> None:
    """Remove a directory that ``make_scratch`` made."""
    shutil.rmtree(path, ignore_errors=True)
    _guard.release(path)


@contextlib.contextmanager
def once_per_thread(what: str) -> Iterator[None]:
    """Within the block, this thread cannot enter another block for the same thing. Only a signal
    handler that loads an op would try that. It would wait forever for a lock that its own thread
    holds, since the interrupted code cannot continue. Raises BuildError."""
    ours = (what, threading.get_ident())
    if ours in _guard.inside:
        raise BuildError(
            f"an op cannot be loaded while the same thread {what}",
            why="a signal handler has interrupted that, and it cannot go on until the handler ends",
            hint="load the op before, or set a flag in the handler and load the op after it",
        )
    _guard.inside.add(ours)
    try:
        yield
    finally:
        _guard.inside.discard(ours)


class _Guard:
    """Starts the watchdog when it is first needed, and tells it what to clean up."""

    def __init__(self) -> None:
        self.exiting = False
        self._begin()

    def _begin(self) -> None:
        self.lock = forks.lock()
        self.token = ""
        self.child: subprocess.Popen[bytes] | None = None
        self.link: socket.socket | None = None
        self.scratch: set[str] = set()
        self.running = 0
        self.inside: set[tuple[str, int]] = set()  # (what, thread) of ``once_per_thread``

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        # A signal handler in between would start a second watchdog, and one of the two would be
        # lost. A watchdog whose socket is closed kills what the other one watches.
        with once_per_thread("talks to its watchdog"), self.lock:
            yield

    @contextlib.contextmanager
    def watch(self) -> Iterator[str]:
        """The token for a child that is about to be started. Makes sure that the watchdog runs."""
        with self._hold_lock():
            self._ensure()
            self.running += 1
            token = self.token
        try:
            yield token
        finally:
            with self._hold_lock():
                self.running -= 1

    def register(self, path: str) -> None:
        """Have the watchdog remove this directory if this process dies before it is released."""
        with self._hold_lock():
            self._ensure()
            self.scratch.add(path)
            if not self._send("+" + path):
                self._ensure()  # the watchdog has just died; start another and tell it everything

    def release(self, path: str) -> None:
        with self._hold_lock():
            if path in self.scratch:  # not one of our parent's
                self.scratch.remove(path)
                self._send("-" + path)

    def _ensure(self) -> None:
        if self.exiting:
            raise BuildCancelled("the build was cancelled: this process is exiting")
        if self.child is not None and self.child.poll() is None:
            return
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
                self.child = _start_watchdog(theirs.fileno(), self.token)
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
            self._send("+" + path)

    def _send(self, message: str) -> bool:
        if self.link is None:
            return False
        try:
            self.link.send(os.fsencode(message), socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def after_fork(self) -> None:
        # The watchdog is the parent's. If the child kept the socket open, the watchdog could not
        # notice the parent's end by it.
        if self.link is not None:
            self.link.close()
        if self.child is not None:
            self.child.returncode = 0  # it is not this process's child, so never wait for it
        self._begin()

    def at_exit(self) -> None:
        with self.lock:
            self.exiting = True
            for path in () if self.running else self.scratch:
                shutil.rmtree(path, ignore_errors=True)
            if self.child is None or self.link is None:
                return
            if not self.running and not any(map(os.path.lexists, self.scratch)):
                self._send("quit")
            self.link.close()
            # Without "quit", daemon threads are still building, and the watchdog kills their
            # children now. Wait for it, so that none is alive after this process has exited.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(5)


def _start_watchdog(link: int, token: str) -> subprocess.Popen[bytes]:
    # Blocked signals stay blocked through exec. So these signals cannot end the watchdog, not even
    # while its interpreter starts. Its own session protects it from the terminal's signals. Others
    # may come from a program that signals every process of a job or a container.
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        with child.starting:
            return subprocess.Popen(
                python(_WATCHDOG, token, str(os.getpid()), isolated=True),
                stdin=link,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=child_environment(),
                start_new_session=True,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_guard = _Guard()
os.register_at_fork(after_in_child=_guard.after_fork)
atexit.register(_guard.at_exit)
