"""The one caller of subprocesses.

Every child gets an argv (never a shell), the allow-listed environment of ``settings``, no
standard input, and a session of its own, so that it and what it starts can be ended as a group.
A supervised child also carries ``OPKILN_BUILD_TOKEN``, inherited by all its descendants; when this
process dies in whatever way, its watchdog (``guard.py``, ``watchdog.py``) ends everything with that
token and removes the scratch directories that were registered here.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from opkiln.errors import BuildCancelled, BuildTimeout, ToolchainError
from opkiln.guard import Guard
from opkiln.settings import child_environment
from opkiln.watchdog import MARKER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Listener = Callable[[Sequence[str]], None]

# Popen waits for the end of a pipe that its child closes by exec. A fork of this process by another
# thread at that moment would hold the pipe open for as long as the forked process lives, and if
# that one waits for our build, for ever. So a fork waits until nothing is being started.
_starting = threading.Lock()
os.register_at_fork(
    before=_starting.acquire,
    after_in_parent=_starting.release,
    after_in_child=_starting.release,
)

_listeners: list[Listener] = []

_WATCHDOG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "watchdog.py")


class Completed(NamedTuple):
    """A process that ended by itself."""

    argv: tuple[str, ...]
    returncode: int  # negative: the signal that ended it
    output: str  # stdout and stderr together, in the order they were written
    wall: float  # seconds
    max_rss: int  # bytes: the peak of its largest process; 0 when it was too short to tell


class Captured(NamedTuple):
    """What a probe said."""

    returncode: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def telling(listener: Listener) -> Iterator[None]:
    """Within the block, tell ``listener`` the argv of every program that any thread starts here."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def told() -> bool:
    """Whether somebody is told of the programs that are started."""
    return bool(_listeners)


def run(
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    tmpdir: str | None = None,
    timeout: float | None = None,
    cancelled: threading.Event | None = None,
    supervised: bool = True,
) -> Completed:
    """Run a program to its end. A non-zero exit is returned, not raised.

    When this returns or raises, the child is reaped and nothing of its process group is alive.
    Raises ToolchainError when the program cannot be started, BuildTimeout after ``timeout``
    seconds, BuildCancelled when ``cancelled`` is set before the end.
    """
    environment = _environment(env, tmpdir)
    with contextlib.ExitStack() as stack:
        if supervised:
            environment[MARKER] = stack.enter_context(_guard.watching())
        ended = _carry_out(
            argv, cwd, environment, apart=False, timeout=timeout, cancelled=cancelled
        )
    output = ended.streams[0]
    return Completed(tuple(argv), ended.returncode, output, ended.wall, ended.max_rss)


def capture(
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 30.0,
) -> Captured:
    """Run a short probe, unsupervised. A non-zero exit is returned.

    Raises ToolchainError when the program cannot be started or does not end in time.
    """
    try:
        ended = _carry_out(
            argv, cwd, _environment(env, None), apart=True, timeout=timeout, cancelled=None
        )
    except BuildTimeout as error:
        raise ToolchainError(error.what, why=error.why, hint=shlex.join(argv)) from None
    return Captured(ended.returncode, ended.streams[0], ended.streams[1])


def attend(argv: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Run a program of the user's in the foreground, with our standard streams, to its end.

    Returns its exit status, negative for the signal that ended it. Raises ToolchainError when it
    cannot be started. An interrupt of the terminal reaches it as it reaches us, and is raised here
    once it has ended.
    """
    _tell(argv)
    try:
        with _starting:
            child = subprocess.Popen(list(argv), env=dict(env))
    except (OSError, ValueError) as error:
        raise _not_started(argv, None, error) from None
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.wait()
        raise


def register_scratch(path: str) -> None:
    """Have the watchdog remove this directory should this process die before it is released."""
    _guard.register(os.fsencode(os.path.abspath(path)))


def release_scratch(path: str) -> None:
    """The directory is removed, or is no longer scratch. Harmless when it was not registered."""
    _guard.release(os.fsencode(os.path.abspath(path)))


def _environment(extra: Mapping[str, str] | None, tmpdir: str | None) -> dict[str, str]:
    # LC_ALL=C and not C.UTF-8: there compilers quote with Unicode marks, which no log needs and
    # which would differ from the messages that are matched.
    environment = {**child_environment(), "LC_ALL": "C"}
    if tmpdir is not None:
        environment["TMPDIR"] = tmpdir
    return {**environment, **(extra or {})}


def _tell(argv: Sequence[str]) -> None:
    for listener in tuple(_listeners):
        listener(argv)


# One child, from start to end


class _Ended(NamedTuple):
    returncode: int
    streams: tuple[str, ...]
    wall: float
    max_rss: int


def _carry_out(
    argv: Sequence[str],
    cwd: str | None,
    environment: Mapping[str, str],
    *,
    apart: bool,
    timeout: float | None,
    cancelled: threading.Event | None,
) -> _Ended:
    if cancelled is not None and cancelled.is_set():
        raise _cancellation(argv)
    # exec() counts the memory of the process image it replaces, and a child starts as an image of
    # this process: wait4 never reports less than our own peak (300 MB for /bin/true in a process
    # that holds 300 MB). Below that mark the sampled peak is used instead.
    floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.monotonic()
    child = _start(argv, cwd, environment, apart)
    follower = _Follower(child)
    finished = False
    try:
        follower.until_exit(argv, timeout, started, cancelled)
        finished = True
    finally:
        # Also after KeyboardInterrupt. (One that strikes inside Popen itself leaves the child to
        # the watchdog.) The leader is not reaped yet, so its number, which is the group's, cannot
        # have gone to another process. A leader killed by the kernel leaves its children behind;
        # that is why the group is ended after an ordinary exit, too.
        _kill_group(child.pid)
        if not finished:
            _await_group_end(child.pid)
        usage = _reap(child)
        follower.close()
    wall = time.monotonic() - started
    if usage is None:
        raise ToolchainError(
            f"the exit status of {argv[0]} is lost",
            why="this process ignores SIGCHLD, or another part of it waits for any child",
            hint="python -c 'import signal; print(signal.getsignal(signal.SIGCHLD))'",
        )
    counted = usage.ru_maxrss * 1024
    max_rss = counted if counted > floor else min(counted, follower.peak)
    streams = tuple(bytes(data).decode("utf-8", "replace") for data in follower.data)
    return _Ended(child.returncode, streams, wall, max_rss)


def _start(
    argv: Sequence[str], cwd: str | None, environment: Mapping[str, str], apart: bool
) -> subprocess.Popen[bytes]:
    _tell(argv)
    try:
        with _starting:
            return subprocess.Popen(
                list(argv),
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if apart else subprocess.STDOUT,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        raise _not_started(argv, cwd, error) from error


def _not_started(argv: Sequence[str], cwd: str | None, error: Exception) -> ToolchainError:
    program = argv[0]
    if cwd is not None and isinstance(error, OSError) and error.filename == cwd:
        why, hint = f"its working directory {cwd}: {error.strerror}", shlex.join(["ls", "-ld", cwd])
    elif isinstance(error, FileNotFoundError) and os.path.exists(program):
        why = "the file is there, but the interpreter or loader it names is not"
        hint = shlex.join(["head", "-c", "100", program])
    elif isinstance(error, OSError):
        why = error.strerror or str(error)
        find = ["ls", "-l"] if os.sep in program else ["command", "-v"]
        hint = shlex.join([*find, program])
    else:
        why, hint = str(error), ""  # a NUL in an argument: nothing to run would help
    return ToolchainError(f"{program} could not be started", why=why, hint=hint)


class _Follower:
    """Reads a child's output and samples its memory until it exits."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.pid = child.pid
        self.pipes = [pipe for pipe in (child.stdout, child.stderr) if pipe is not None]
        self.data = [bytearray() for _ in self.pipes]
        self.open = {pipe.fileno(): data for pipe, data in zip(self.pipes, self.data, strict=True)}
        self.peak = 0
        try:
            self.pidfd: int | None = os.pidfd_open(child.pid)
        except (AttributeError, OSError):
            self.pidfd = None  # then the exit is noticed at the next tick

    def until_exit(
        self,
        argv: Sequence[str],
        timeout: float | None,
        started: float,
        cancelled: threading.Event | None,
    ) -> None:
        """Return when the child has exited and is not yet reaped."""
        poller = select.poll()
        for fd in self.open:
            os.set_blocking(fd, False)
            poller.register(fd, select.POLLIN)
        if self.pidfd is not None:
            poller.register(self.pidfd, select.POLLIN)
        tick = 0.002
        while True:
            self.peak = max(self.peak, _tree_peak(self.pid))
            for fd, _ in poller.poll(tick * 1000):
                if fd != self.pidfd and not self._read(fd):
                    poller.unregister(fd)
            # The exit, not the end of the pipe, is what counts: a compiler cache's server may
            # have inherited the pipe, and holds it for as long as it lives.
            if _has_exited(self.pid):
                return
            if cancelled is not None and cancelled.is_set():
                raise _cancellation(argv)
            if timeout is not None and time.monotonic() - started > timeout:
                raise BuildTimeout(
                    f"{argv[0]} ran longer than {timeout:g} s and was ended",
                    why=_shown(argv),
                    hint=f"OPKILN_BUILD_TIMEOUT={max(60, int(timeout) * 2)}",
                )
            tick = min(tick * 2, 0.05)

    def _read(self, fd: int) -> bool:
        """Take what is there; False at the end of the pipe."""
        try:
            # As much as a pipe can hold, so that one read after the exit misses nothing.
            chunk = os.read(fd, 1 << 20)
        except BlockingIOError:
            return True
        self.open[fd] += chunk
        return bool(chunk)

    def close(self) -> None:
        for fd in self.open:
            self._read(fd)
        for pipe in self.pipes:
            pipe.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


def _has_exited(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True  # reaped by somebody else; _reap() says so


def _reap(child: subprocess.Popen[bytes]) -> resource.struct_rusage | None:
    """Wait for a child that has exited or was killed; None when its status is lost."""
    try:
        _, status, usage = os.wait4(child.pid, 0)
    except ChildProcessError:
        child.returncode = 0  # there is nothing left that Popen could wait for
        return None
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _await_group_end(group: int) -> None:
    """Wait for killed processes to be dead, so that none writes into a directory being removed.

    Two seconds at most: one stuck in the kernel must not hold up the others.
    """
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and any(_living_members(group)):
        time.sleep(0.005)


def _living_members(group: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command may hold anything; the fields begin after its last parenthesis.
                    state, _, pgrp = file.read().rpartition(b")")[2].split()[:3]
            except (OSError, ValueError):
                continue  # ended while it was looked at
            if int(pgrp) == group and state not in (b"Z", b"X"):
                yield int(name)


_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)


def _tree_peak(pid: int) -> int:
    """The largest resident peak so far of any living process at or below ``pid``, in bytes."""
    peak, found = 0, [pid]
    while found:
        here = f"/proc/{found.pop()}"
        try:
            with open(f"{here}/status", "rb") as file:
                match = _PEAK.search(file.read())
            for task in os.listdir(f"{here}/task"):
                with open(f"{here}/task/{task}/children", "rb") as file:
                    found += map(int, file.read().split())
        except OSError:
            continue  # ended while it was looked at, or a kernel without `children`
        peak = max(peak, int(match[1]) * 1024 if match else 0)
    return peak


def _cancellation(argv: Sequence[str]) -> BuildCancelled:
    return BuildCancelled(f"{argv[0]} was ended: the build was cancelled", why=_shown(argv))


def _shown(argv: Sequence[str]) -> str:
    line = shlex.join(argv)
    return line if len(line) <= 2000 else f"{line[:2000]} ..."


def _start_watchdog(link: int, token: str) -> subprocess.Popen[bytes]:
    # Blocked signals stay blocked through exec, so these cannot end it, not even while its
    # interpreter starts. Its own session keeps the terminal's away; others come from whoever
    # signals every process of a job or a container, the builder among them.
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        with _starting:
            return subprocess.Popen(
                [sys.executable or "", "-I", "-S", _WATCHDOG, token, str(os.getpid())],
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
