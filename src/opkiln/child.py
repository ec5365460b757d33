"""One child process, from its start to its end. The rest of opkiln uses ``process.py``."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import shlex
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from opkiln import endless
from opkiln.errors import BuildCancelled, BuildError, BuildTimeout, InputError, ToolchainError
from opkiln.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Listener = Callable[[Sequence[str]], None]

# Popen waits for the end of a pipe that its child closes at exec. If another thread forks this
# process at that moment, the forked process holds the pipe open for as long as it lives. If that
# process waits for our build, this is a deadlock. So a fork waits until no child is being started.
starting = threading.RLock()  # a signal handler may start a program, too
os.register_at_fork(
    before=starting.acquire,
    after_in_parent=starting.release,
    after_in_child=starting.release,
)

listeners: list[Listener] = []  # told of every program that is started

# Bytes of a child's output that are kept: from the start, where a compiler's first error is, and
# from the end, where it says why it gave up.
_HEAD, _TAIL = 4 << 20, 1 << 20
_LOOK = 0.5  # seconds between two looks at the files that a child reads


class Ended(NamedTuple):
    """How a child ended."""

    returncode: int  # if negative, the signal that ended it
    streams: tuple[str, ...]
    wall: float  # seconds
    max_rss: int  # bytes: the peak of its largest process; 0 if it ran too briefly to measure


class Child:
    """A child in a session of its own. At the end of its ``with`` block the child is reaped and its
    whole process group is dead."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: str | None = None,
        split_stderr: bool = False,
        watch_files: bool = False,
        waits: bool = False,
    ) -> None:
        """Start it. If it ``waits``, its standard input is a socket; otherwise it has none. Raises
        ToolchainError."""
        # wait4 also counts the memory of the image that exec() replaced, and a child starts as a
        # copy of this process. So wait4 never reports less than our own peak (300 MB for /bin/true
        # in a process that uses 300 MB). If it reports no more than that, the sampled peak is used.
        self._floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._argv = argv
        self._started = time.monotonic()
        self._input: socket.socket | None = None
        self._popen = self._start(environment, cwd, split_stderr, waits)
        self._follower = _Follower(
            self._popen, environment.get("TMPDIR", "") if watch_files else None
        )
        self._exited = self._closed = False
        self._wall = 0.0
        self._usage: resource.struct_rusage | None = None

    def _start(
        self, environment: Mapping[str, str], cwd: str | None, split_stderr: bool, waits: bool
    ) -> subprocess.Popen[bytes]:
        tell(self._argv)
        theirs: socket.socket | None = None
        if waits:
            # Not a pipe: a program may have restored SIGPIPE's default, which would end it.
            self._input, theirs = socket.socketpair()
        try:
            with starting:
                return subprocess.Popen(
                    list(self._argv),
                    cwd=cwd,
                    env=dict(environment),
                    stdin=theirs.fileno() if theirs else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE if split_stderr else subprocess.STDOUT,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            raise not_started(self._argv, cwd, error) from error
        finally:
            if theirs is not None:
                theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._closed:
            return
        self._closed = True
        # This also runs after KeyboardInterrupt. (If that is raised inside Popen itself, the
        # watchdog has to kill the child.) The leader is not reaped yet, so its pid, which is also
        # the group's id, cannot belong to another process. A leader that the kernel killed leaves
        # its children behind. That is why the group is also killed after an ordinary exit.
        _kill_group(self._popen.pid)
        if not self._exited:
            _await_group_end(self._popen.pid)
        self._usage = _reap(self._popen)
        self._follower.close()
        if self._input is not None:
            self._input.close()
        self._wall = time.monotonic() - self._started

    def send(self, data: bytes, *, last: bool = False) -> None:
        """Give data to a child that waits for it. One that has ended does not get it. After the
        ``last`` data its standard input ends."""
        assert self._input is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._input.send(data, socket.MSG_NOSIGNAL)
            if last:
                self._input.shutdown(socket.SHUT_WR)

    def follow(
        self,
        timeout: float | None,
        *,
        since: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Wait until the child exits. Raises BuildTimeout ``timeout`` seconds after ``since``
        (default: its start), BuildCancelled, and InputError as ``process.run`` says."""
        begin = self._started if since is None else since
        self._follower.until_exit(self._argv, timeout, begin, cancelled)
        self._exited = True

    def ended(self) -> Ended:
        """How it ended, after the ``with`` block. Raises BuildError if that is lost: another
        program's would be lost, too, so it must not read as a refusal of this one."""
        if self._usage is None:
            why = (
                "another part of this process waits for any child: os.wait() or os.waitpid(-1, ...)"
            )
            hint = "os.waitpid(pid, 0)    # there: wait for children that it started"
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                why = "this process ignores SIGCHLD, or the one that started it did"
                hint = "signal.signal(signal.SIGCHLD, signal.SIG_DFL)    # in Python, before this"
            raise BuildError(f"the exit status of {self._argv[0]} is lost", why=why, hint=hint)
        counted = self._usage.ru_maxrss * 1024
        max_rss = counted if counted > self._floor else min(counted, self._follower.peak)
        streams = tuple(data.text() for data in self._follower.data)
        return Ended(self._popen.returncode, streams, self._wall, max_rss)


def carry_out(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    cwd: str | None = None,
    split_stderr: bool = False,
    timeout: float | None = None,
    since: float | None = None,
    cancelled: threading.Event | None = None,
    watch_files: bool = False,
    given: bytes | None = None,
) -> Ended:
    """Run a program to its end; ``process.run`` says how and what is raised. ``given`` is its
    standard input."""
    if timeout is not None:
        timeout = min(timeout, settings.build_timeout)
        if since is not None and time.monotonic() - since > timeout:
            raise _too_slow(argv, timeout, "was not started within")
    if cancelled is not None and cancelled.is_set():
        raise _cancellation(argv)
    child = Child(
        argv, environment, cwd=cwd, split_stderr=split_stderr, watch_files=watch_files,
        waits=given is not None,
    )  # fmt: skip
    with child:
        if given is not None:
            child.send(given, last=True)
        child.follow(timeout, since=since, cancelled=cancelled)
    return child.ended()


def tell(argv: Sequence[str]) -> None:
    """Tell the listeners that a program is started."""
    for listener in tuple(listeners):
        listener(argv)


def not_started(argv: Sequence[str], cwd: str | None, error: Exception) -> ToolchainError:
    """The error for a program that cannot be started."""
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
