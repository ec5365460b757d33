"""Runs subprocesses. The rest of opkiln does it by this module; ``child.py`` is one child's life.

Every child gets an argv (never a shell), the allow-listed environment of ``settings``, no standard
input, and its own session, so that it and its children can be killed as a group. A child of ``run``
also has ``OPKILN_BUILD_TOKEN`` in its environment, which all its descendants inherit. If this
process dies, for whatever reason, its watchdog (``guard.py``, ``watchdog.py``) kills every process
with that token and removes the scratch directories that were registered here. If the watchdog is
killed with it, compilers and linkers end by themselves (``observing/observer.c``).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from opkiln import child
from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.guard import Guard, once_per_thread
from opkiln.settings import child_environment, settings
from opkiln.watchdog import MARKER

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping, Sequence

    from opkiln.child import Ended, Listener

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_WATCHDOG = os.path.join(_PACKAGE, "watchdog.py")


class Completed(NamedTuple):
    """A process that ended by itself."""

    argv: tuple[str, ...]
    returncode: int  # if negative, the signal that ended it
    # stdout and stderr together, in the order they were written. Of a long output, the start and
    # the end, with a line between them that says how much was left out.
    output: str
    wall: float  # seconds
    max_rss: int  # bytes: the peak of its largest process; 0 if it ran too briefly to measure


class Captured(NamedTuple):
    """The result of a probe."""

    returncode: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def telling(listener: Listener) -> Iterator[None]:
    """Within the block, call ``listener`` with the argv of every program that any thread starts."""
    child.listeners.append(listener)
    try:
        yield
    finally:
        child.listeners.remove(listener)


def told() -> bool:
    """Whether there is a listener for the programs that are started."""
    return bool(child.listeners)


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
    with contextlib.ExitStack() as stack:
        stack.enter_context(once_per_thread("runs a program"))
        environment[MARKER] = stack.enter_context(_guard.watching())
        ended = child.carry_out(
            argv, environment, cwd=cwd, timeout=timeout, since=since, cancelled=cancelled,
            watch_files=watch_files,
        )  # fmt: skip
    return _completed(argv, ended)


class Started:
    """A program that waits for one byte on its standard input."""

    def __init__(self, argv: Sequence[str], running: child.Child) -> None:
        self._argv, self._child = argv, running
        self._since: float | None = None

    def go_on(self) -> None:
        """Send it that byte."""
        self._since = time.monotonic()
        self._child.send(b"\n")

    def finish(self, timeout: float) -> Completed:
        """Let it go on, and wait for its end. Raises BuildTimeout ``timeout`` seconds after it went
        on."""
        if self._since is None:
            self.go_on()
        with once_per_thread("runs a program"), self._child:
            self._child.follow(min(timeout, settings.build_timeout), since=self._since)
        return _completed(self._argv, self._child.ended())


@contextlib.contextmanager
def started(argv: Sequence[str], *, tmpdir: str) -> Iterator[Started]:
    """Start a program that prepares itself and then waits. It is dead at the end of the block.

    Raises ToolchainError if it cannot be started.
    """
    environment = _environment(None, tmpdir)
    with _guard.watching() as token:
        environment[MARKER] = token
        with once_per_thread("runs a program"):
            running = child.Child(argv, environment, waits=True)
        with running:
            yield Started(argv, running)


def _completed(argv: Sequence[str], ended: Ended) -> Completed:
    output = ended.streams[0]
    return Completed(tuple(argv), ended.returncode, output, ended.wall, ended.max_rss)


def capture(
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 30.0,
    given: bytes | None = None,
) -> Captured:
    """Run a short probe, unsupervised. A non-zero exit status is returned, not raised. ``given`` is
    its standard input.

    Raises ToolchainError if the program cannot be started or does not end in time: within
    ``timeout`` seconds, or ``OPKILN_BUILD_TIMEOUT`` if that is less.
    """
    try:
        ended = child.carry_out(
            argv, _environment(env, None), cwd=cwd, split_stderr=True, timeout=timeout, given=given
        )
    except BuildTimeout as error:
        raise ToolchainError(error.what, why=error.why, hint=shlex.join(argv)) from None
    return Captured(ended.returncode, ended.streams[0], ended.streams[1])


def run_foreground(argv: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Run the user's program in the foreground, with our standard streams, to its end.

    Returns its exit status, or the negative number of the signal that ended it. Raises
    ToolchainError if it cannot be started. An interrupt from the terminal reaches both processes,
    and KeyboardInterrupt is raised here once the program has ended.
    """
    child.tell(argv)
    try:
        with child.starting:
            program = subprocess.Popen(list(argv), env=dict(env))
    except (OSError, ValueError) as error:
        raise child.not_started(argv, None, error) from None
    try:
        return program.wait()
    except KeyboardInterrupt:
        program.wait()
        raise


def python(*arguments: str, isolated: bool = False) -> tuple[str, ...]:
    """The argv of a Python child of ours, which imports nothing from the working directory.

    A file there may have any name: without ``-P``, ``-c`` and ``-m`` would run ``./torch.py`` for
    ``import torch``. An ``isolated`` child has only the standard library.
    """
    # An embedded interpreter has no executable, but often there is a Python next to its library.
    interpreter = sys.executable or os.path.join(sys.base_exec_prefix, "bin", "python3")
    return (interpreter, *(("-I", "-S") if isolated else ("-P",)), *arguments)


def python_code(code: str, *arguments: str) -> tuple[str, ...]:
    """The argv that runs ``code``, which may import opkiln, in a Python child of ours. ``sys`` is
    imported, and the arguments are in ``sys.argv[1:]``."""
    # opkiln's own directory comes last: it may be the working directory.
    start = f"import sys; sys.path.append({os.path.dirname(_PACKAGE)!r})\n{code}"
    return python("-c", start, *arguments)


def signal_name(returncode: int) -> str:
    """The signal that ended a process, by its negative exit status: ``SIGKILL``, ``signal 40``."""
    try:
        return signal.Signals(-returncode).name
    except ValueError:  # real-time signals have no names
        return f"signal {-returncode}"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger. False if it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name may contain anything, so the fields begin after the last ")".
            return file.read().rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])
    except OSError:
        return False


def make_scratch(root: str, prefix: str) -> str:
    """A new private directory. It is removed when this process ends, unless released earlier.
    Raises OSError."""
    path = os.path.abspath(f"{root}/opkiln-{prefix}-{os.urandom(8).hex()}")
    # The watchdog is told first. In the other order, a process killed in between would leave a
    # directory that nobody knows of.
    register_scratch(path)
    try:
        os.mkdir(path, 0o700)
    except OSError:
        release_scratch(path)
        raise
    return path


def register_scratch(path: str) -> None:
    """Have the watchdog remove this directory if this process dies before it is released."""
    _guard.register(os.fsencode(os.path.abspath(path)))


def release_scratch(path: str) -> None:
    """Unregister a directory that was removed or is to be kept. Does nothing if it was not
    registered."""
    _guard.release(os.fsencode(os.path.abspath(path)))


def _environment(extra: Mapping[str, str] | None, tmpdir: str | None) -> dict[str, str]:
    # LC_ALL=C and not C.UTF-8: with C.UTF-8, compilers use Unicode quotation marks. Then the
    # messages would not match our patterns, and logs do not need them.
    environment = {**child_environment(), "LC_ALL": "C"}
    if place := tmpdir or settings.tmpdir:  # a compiler that only tells its version may write there
        environment["TMPDIR"] = os.path.abspath(place)
    return {**environment, **(extra or {})}


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


_guard = Guard(_start_watchdog)
