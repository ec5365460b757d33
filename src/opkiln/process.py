"""Runs subprocesses. No other module of opkiln does.

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

from opkiln import endless
from opkiln.errors import BuildCancelled, BuildTimeout, InputError, ToolchainError
from opkiln.guard import Guard, once_per_thread
from opkiln.settings import child_environment, settings
from opkiln.watchdog import MARKER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Listener = Callable[[Sequence[str]], None]

# Popen waits for the end of a pipe that its child closes at exec. If another thread forks this
# process at that moment, the forked process holds the pipe open for as long as it lives. If that
# process waits for our build, this is a deadlock. So a fork waits until no child is being started.
_starting = threading.RLock()  # a signal handler may start a program, too
os.register_at_fork(
    before=_starting.acquire,
    after_in_parent=_starting.release,
    after_in_child=_starting.release,
)

_listeners: list[Listener] = []

# Bytes of a child's output that are kept: from the start, where a compiler's first error is, and
# from the end, where it says why it gave up.
_HEAD, _TAIL = 4 << 20, 1 << 20
_LOOK = 0.5  # seconds between two looks at the files that a child reads

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
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def told() -> bool:
    """Whether there is a listener for the programs that are started."""
    return bool(_listeners)


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
        ended = _carry_out(
            argv, cwd, environment, split_stderr=False, timeout=timeout, since=since,
            cancelled=cancelled, watch_files=watch_files,
        )  # fmt: skip
    output = ended.streams[0]
    return Completed(tuple(argv), ended.returncode, output, ended.wall, ended.max_rss)


def capture(
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 30.0,
) -> Captured:
    """Run a short probe, unsupervised. A non-zero exit status is returned, not raised.

    Raises ToolchainError if the program cannot be started or does not end in time: within
    ``timeout`` seconds, or ``OPKILN_BUILD_TIMEOUT`` if that is less.
    """
    try:
        ended = _carry_out(argv, cwd, _environment(env, None), split_stderr=True, timeout=timeout)
    except BuildTimeout as error:
        raise ToolchainError(error.what, why=error.why, hint=shlex.join(argv)) from None
    return Captured(ended.returncode, ended.streams[0], ended.streams[1])


def run_foreground(argv: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Run the user's program in the foreground, with our standard streams, to its end.

    Returns its exit status, or the negative number of the signal that ended it. Raises
    ToolchainError if it cannot be started. An interrupt from the terminal reaches both processes,
    and KeyboardInterrupt is raised here once the program has ended.
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
    split_stderr: bool,
    timeout: float | None,
    since: float | None = None,
    cancelled: threading.Event | None = None,
    watch_files: bool = False,
) -> _Ended:
    if timeout is not None:
        timeout = min(timeout, settings.build_timeout)
    if cancelled is not None and cancelled.is_set():
        raise _cancellation(argv)
    # wait4 also counts the memory of the image that exec() replaced, and a child starts as a copy
    # of this process. So wait4 never reports less than our own peak (300 MB for /bin/true in a
    # process that uses 300 MB). If it reports no more than that, the sampled peak is used.
    floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.monotonic()
    if timeout is not None and since is not None and started - since > timeout:
        raise _too_slow(argv, timeout, "was not started within")
    child = _start(argv, cwd, environment, split_stderr)
    follower = _Follower(child, environment.get("TMPDIR", "") if watch_files else None)
    finished = False
    try:
        follower.until_exit(argv, timeout, started if since is None else since, cancelled)
        finished = True
    finally:
        # This also runs after KeyboardInterrupt. (If that is raised inside Popen itself, the
        # watchdog has to kill the child.) The leader is not reaped yet, so its pid, which is also
        # the group's id, cannot belong to another process. A leader that the kernel killed leaves
        # its children behind. That is why the group is also killed after an ordinary exit.
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
    streams = tuple(data.text() for data in follower.data)
    return _Ended(child.returncode, streams, wall, max_rss)


def _start(
    argv: Sequence[str], cwd: str | None, environment: Mapping[str, str], split_stderr: bool
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
                stderr=subprocess.PIPE if split_stderr else subprocess.STDOUT,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        raise _not_started(argv, cwd, error) from error


def _not_started(argv: Sequence[str], cwd: str | None, error: Exception) -> ToolchainError:
    program = argv[0]
    if cwd is not None and isinstance(error, OSError) and error.filename == cwd:
        why, hint = f"its working directory {cwd}: {error.strerror}", shlex.join(["ls", "-ld", cwd])
    elif isinstance(error, FileNotFoundError) and os.path.exists(program):
        why = "the file exists, but the interpreter or loader that it names does not"
        hint = shlex.join(["head", "-c", "100", program])
    elif isinstance(error, OSError):
        why = error.strerror or str(error)
        find = ["ls", "-l"] if os.sep in program else ["command", "-v"]
        hint = shlex.join([*find, program])
    else:
        why, hint = str(error), ""  # a NUL in an argument: there is no command that would help
    return ToolchainError(f"{program} could not be started", why=why, hint=hint)


class _Output:
    """The start and the end of what a child writes to one pipe."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def add(self, chunk: bytes) -> None:
        room = _HEAD - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        # Twice the size, so that the bytes that stay are not moved for every chunk.
        if len(self._tail) > 2 * _TAIL:
            self._cut()

    def _cut(self) -> None:
        extra = len(self._tail) - _TAIL
        if extra > 0:
            del self._tail[:extra]
            self._left_out += extra

    def text(self) -> str:
        if not self._left_out and len(self._tail) <= _TAIL:
            return (self._head + self._tail).decode("utf-8", "replace")
        self._cut()
        # Whole lines, and so whole characters too, unless a line is longer than either part.
        head, newline, _ = self._head.rpartition(b"\n")
        head = head + newline if newline else self._head
        start = self._tail.find(b"\n") + 1
        tail = self._tail[start:]
        left_out = self._left_out + len(self._head) - len(head) + start
        text = f"[opkiln left out {left_out} bytes of output here]\n".encode()
        middle = text if head.endswith(b"\n") else b"\n" + text
        return (head + middle + tail).decode("utf-8", "replace")


class _Follower:
    """Reads a child's output and samples its memory until it exits."""

    def __init__(self, child: subprocess.Popen[bytes], own_files: str | None) -> None:
        self.pid = child.pid
        self.own_files = own_files  # where the child makes files; None: do not watch what it reads
        self.pipes = [pipe for pipe in (child.stdout, child.stderr) if pipe is not None]
        self.data = [_Output() for _ in self.pipes]
        self.open = {pipe.fileno(): data for pipe, data in zip(self.pipes, self.data, strict=True)}
        self.peak = 0
        try:
            self.pidfd: int | None = os.pidfd_open(child.pid)
        except (AttributeError, OSError):
            self.pidfd = None  # without it, the exit is noticed at the next tick

    def until_exit(
        self,
        argv: Sequence[str],
        timeout: float | None,
        since: float,
        cancelled: threading.Event | None,
    ) -> None:
        """Wait until the child has exited. It is not reaped yet. Raises BuildTimeout ``timeout``
        seconds after ``since``."""
        poller = select.poll()
        for fd in self.open:
            os.set_blocking(fd, False)
            poller.register(fd, select.POLLIN)
        if self.pidfd is not None:
            poller.register(self.pidfd, select.POLLIN)
        tick = 0.002
        look_at, seen = time.monotonic() + _LOOK, None
        while True:
            self.peak = max(self.peak, _tree_peak(self.pid))
            if self.own_files is not None and time.monotonic() >= look_at:
                # Twice the same, so that a child has the time to write to a FIFO of another.
                before, seen = seen, endless.found(_tree(self.pid), self.own_files)
                if seen is not None and seen == before:
                    raise _endless(argv, *seen)
                look_at = time.monotonic() + _LOOK
            for fd, _ in poller.poll(tick * 1000):
                if fd != self.pidfd and not self._read(fd):
                    poller.unregister(fd)
            # Wait for the exit, not for the end of the pipe: the server of a compiler cache may
            # have inherited the pipe, and holds it open for as long as it lives.
            if _has_exited(self.pid):
                return
            if cancelled is not None and cancelled.is_set():
                raise _cancellation(argv)
            if timeout is not None and time.monotonic() - since > timeout:
                raise _too_slow(argv, timeout, "was killed, because it did not end within")
            tick = min(tick * 2, 0.05)

    def _read(self, fd: int) -> bool:
        """Read the available data. Returns False at the end of the pipe."""
        try:
            # As much as a pipe can hold, so that one read after the exit gets everything.
            chunk = os.read(fd, 1 << 20)
        except BlockingIOError:
            return True
        self.open[fd].add(chunk)
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
        return True  # other code has reaped it; _reap() reports that


def _reap(child: subprocess.Popen[bytes]) -> resource.struct_rusage | None:
    """Wait for a child that has exited or was killed. Returns None if its status is lost."""
    try:
        _, status, usage = os.wait4(child.pid, 0)
    except ChildProcessError:
        child.returncode = 0  # so that Popen does not wait for it either
        return None
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _await_group_end(group: int) -> None:
    """Wait until killed processes are dead, so that none writes into a directory being removed.

    Waits two seconds at most: a process stuck in the kernel must not block us.
    """
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and any(_living_members(group)):
        time.sleep(0.005)


def _living_members(group: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The command name may contain anything, so the fields begin after the last ")".
                    state, _, pgrp = file.read().rpartition(b")")[2].split()[:3]
            except (OSError, ValueError):
                continue  # it has just ended
            if int(pgrp) == group and state not in (b"Z", b"X"):
                yield int(name)


_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)


def _tree_peak(pid: int) -> int:
    """The largest resident peak so far of ``pid`` and its living descendants, in bytes."""
    peak = 0
    for each in _tree(pid):
        try:
            with open(f"/proc/{each}/status", "rb") as file:
                match = _PEAK.search(file.read())
        except OSError:
            continue  # it has just ended
        peak = max(peak, int(match[1]) * 1024 if match else 0)
    return peak


def _tree(pid: int) -> Iterator[int]:
    """``pid`` and its living descendants."""
    found = [pid]
    while found:
        here = found.pop()
        yield here
        try:
            for task in os.listdir(f"/proc/{here}/task"):
                with open(f"/proc/{here}/task/{task}/children", "rb") as file:
                    found += map(int, file.read().split())
        except OSError:
            continue  # it has just ended, or the kernel has no `children` files


def _endless(argv: Sequence[str], name: str, path: str) -> InputError:
    what, why, hint = "a FIFO that nobody writes to", "", ["ls", "-lL", path]
    if path.startswith("/dev/"):
        what = "a device without an end"
        why = "a file that is compiled or included leads there\n"
        if "-c" in argv[:-1]:
            source = argv[list(argv).index("-c") + 1]
            hint = ["find", "-L", os.path.dirname(source) or ".", "-samefile", path]
    return InputError(
        f"{argv[0]} was killed: {name} reads {path}, {what}",
        why=why + _shown(argv),
        hint=shlex.join(hint),
    )


def _too_slow(argv: Sequence[str], timeout: float, how: str) -> BuildTimeout:
    return BuildTimeout(
        f"{argv[0]} {how} {timeout:g} s",
        why=_shown(argv),
        hint=f"OPKILN_BUILD_TIMEOUT={max(60, int(timeout) * 2)}",
    )


def _cancellation(argv: Sequence[str]) -> BuildCancelled:
    return BuildCancelled(f"{argv[0]} was killed: the build was cancelled", why=_shown(argv))


def _shown(argv: Sequence[str]) -> str:
    line = shlex.join(argv)
    return line if len(line) <= 2000 else f"{line[:2000]} ..."


def _start_watchdog(link: int, token: str) -> subprocess.Popen[bytes]:
    # Blocked signals stay blocked through exec. So these signals cannot end the watchdog, not even
    # while its interpreter starts. Its own session protects it from the terminal's signals. Others
    # may come from a program that signals every process of a job or a container.
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        with _starting:
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
