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
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from opkiln.base import forks
from opkiln.errors import BuildCancelled, BuildError, BuildTimeout, InputError, ToolchainError
from opkiln.run.watchdog import open_pidfd

Listener = Callable[[Sequence[str]], None]

# Popen waits for the end of a pipe that its child closes at exec. If another thread forks this
# process at that moment, the forked process holds the pipe open for as long as it lives. If that
# process waits for our build, this is a deadlock. So a fork waits until no child is being started.
starting = forks.lock()  # a signal handler may start a program, too
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


class Completed(NamedTuple):
    """A process that ended by itself."""

    argv: tuple[str, ...]
    returncode: int  # if negative, the signal that ended it
    # stdout and stderr together, in the order they were written; of a captured process, stdout. Of
    # a long output, the start and the end, with a line between them that says how much was left out
    output: str
    stderr: str  # of a captured process
    wall: float  # seconds
    max_rss: int  # bytes: the peak of its largest process; 0 if it ran too briefly to measure


def start(
    argv: Sequence[str], program: subprocess.Popen[bytes] | None = None, **how: Any
) -> subprocess.Popen[bytes]:
    """Start a program, and tell the listeners. Raises ToolchainError. A caller that passes a Popen
    which is not initialized yet finds the pid in it even if an interrupt ends this call."""
    program = subprocess.Popen.__new__(subprocess.Popen) if program is None else program
    for listener in tuple(listeners):
        listener(argv)
    try:
        with starting:
            subprocess.Popen.__init__(program, list(argv), **how)
    except (OSError, ValueError) as error:
        raise _start_error(argv, how.get("cwd"), error) from error
    return program


class Child:
    """A child in its own session. It starts with the ``with`` block. At the end of the block it is
    reaped, and its whole process group is dead."""

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
        """If it ``waits``, its standard input is a socket; otherwise it has none. With
        ``watch_files``, it is killed when it reads a file without an end."""
        # wait4 also counts the memory of the image that exec() replaced, and a child starts as a
        # copy of this process. So wait4 never reports less than our own peak (300 MB for /bin/true
        # in a process that uses 300 MB). If it reports no more than that, the sampled peak is used.
        self._floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._argv, self._waits = argv, waits
        self._how: dict[str, Any] = {
            "cwd": cwd, "env": dict(environment), "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE if split_stderr else subprocess.STDOUT,
            "start_new_session": True,
        }  # fmt: skip
        self._own_files = environment.get("TMPDIR", "") if watch_files else None
        self._closed = False
        self._peak = 0
        self._wall = 0.0
        self._usage: resource.struct_rusage | None = None
        self._started = 0.0
        self._input: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
        self._pipes: list[IO[bytes]] = []
        self._outputs: dict[int, _PipeText] = {}
        self._pidfd: int | None = None

    def __enter__(self) -> Child:
        """Start it. Raises ToolchainError."""
        if not self._started:
            self._started = time.monotonic()
            try:
                self._start()
            except BaseException:
                self.__exit__()
                raise
        return self

    def _start(self) -> None:
        theirs: socket.socket | None = None
        if self._waits:
            # Not a pipe: a program may have restored SIGPIPE's default, which would end it.
            self._input, theirs = socket.socketpair()
            self._how["stdin"] = theirs.fileno()
        try:
            start(self._argv, self._popen, **self._how)
        finally:
            if theirs is not None:
                theirs.close()
        self._pipes = [each for each in (self._popen.stdout, self._popen.stderr) if each]
        self._outputs = {pipe.fileno(): _PipeText() for pipe in self._pipes}
        self._pidfd = open_pidfd(self._pid)  # without it, the exit is noticed at the next tick

    @property
    def _pid(self) -> int:
        return self._popen.pid

    def __exit__(self, *_: object) -> None:
        if self._closed:
            return
        self._closed = True
        # This also runs after KeyboardInterrupt. (If that is raised before Popen has the pid, the
        # watchdog has to kill the child. Popen has reaped one that could not be started.) The
        # leader is not reaped yet, so its pid, which is also the group's id, cannot belong to
        # another process. A leader that the kernel killed leaves its children behind. That is why
        # the group is also killed after an ordinary exit.
        if getattr(self._popen, "pid", None) is not None and self._popen.returncode is None:
            exited = _has_exited(self._pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            if not exited:
                _await_group_end(self._pid)
            self._reap()
        for fd in self._outputs:
            self._read(fd)
        for pipe in self._pipes:
            pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        if self._input is not None:
            self._input.close()
        self._wall = time.monotonic() - self._started

    def _reap(self) -> None:
        try:
            _, status, self._usage = os.wait4(self._pid, 0)
            self._popen.returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            self._popen.returncode = 0  # so that Popen does not wait for it either

    def send(self, data: bytes, *, last: bool = False) -> None:
        """Send data to a child that waits for it; does nothing if it has ended. After the ``last``
        data its standard input ends."""
        assert self._input is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._input.send(data, socket.MSG_NOSIGNAL)
            if last:
                self._input.shutdown(socket.SHUT_WR)

    def resume(self) -> None:
        """Let a child continue that waits for one byte. Its time counts from here."""
        self._started = time.monotonic()
        self.send(b"\n")

    def finish(
        self,
        timeout: float | None,
        *,
        since: float | None = None,
        cancelled: threading.Event | None = None,
    ) -> Completed:
        """Wait until the child exits. Afterwards it is reaped, as at the end of the block.

        Raises BuildTimeout ``timeout`` seconds after ``since`` (default: its start), BuildCancelled
        and InputError as ``process.run`` does. Raises BuildError if its exit status is lost: every
        program's would be, so it must not look like a failure of this one.
        """
        with self:
            self._follow(timeout, self._started if since is None else since, cancelled)
        if self._usage is None:
            raise _lost_status_error(self._argv)
        counted = self._usage.ru_maxrss * 1024
        max_rss = counted if counted > self._floor else min(counted, self._peak)
        output, stderr = (*(each.text() for each in self._outputs.values()), "")[:2]
        code = self._popen.returncode
        return Completed(tuple(self._argv), code, output, stderr, self._wall, max_rss)

    def _follow(
        self, timeout: float | None, since: float, cancelled: threading.Event | None
    ) -> None:
        """Read the output and sample the memory until the child has exited. It is not reaped."""
        poller = select.poll()
        for fd in self._outputs:
            os.set_blocking(fd, False)
            poller.register(fd, select.POLLIN)
        if self._pidfd is not None:
            poller.register(self._pidfd, select.POLLIN)
        tick = 0.002
        look_at, seen = time.monotonic() + _LOOK, None
        while True:
            self._peak = max(self._peak, *map(_peak, _tree(self._pid)))
            if self._own_files is not None and time.monotonic() >= look_at:
                # It must be the same twice, so that another child has the time to write to a FIFO.
                before, seen = seen, _find_endless(self._pid, self._own_files)
                if seen is not None and seen == before:
                    raise _endless_error(self._argv, *seen)
                look_at = time.monotonic() + _LOOK
            for fd, _ in poller.poll(tick * 1000):
                if fd != self._pidfd and not self._read(fd):
                    poller.unregister(fd)
            # Wait for the exit, not for the end of the pipe: the server of a compiler cache may
            # have inherited the pipe, and holds it open for as long as it lives.
            if _has_exited(self._pid):
                return
            if cancelled is not None and cancelled.is_set():
                raise cancel_error(self._argv)
            if timeout is not None and time.monotonic() - since > timeout:
                raise timeout_error(
                    self._argv, timeout, "was killed, because it did not end within"
                )
            tick = min(tick * 2, 0.05)

    def _read(self, fd: int) -> bool:
        """Read the available data. Returns False at the end of the pipe."""
        try:
            # As much as a pipe can hold, so that one read after the exit gets everything.
            chunk = os.read(fd, 1 << 20)
        except BlockingIOError:
            return True
        self._outputs[fd].add(chunk)
        return bool(chunk)


class _PipeText:
    """The start and the end of what a child writes to one pipe."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        room = _HEAD - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        self._size += len(chunk)
        # Twice the size, so that the bytes that stay are not moved for every chunk.
        if len(self._tail) > 2 * _TAIL:
            del self._tail[:-_TAIL]

    def text(self) -> str:
        if self._size <= _HEAD + _TAIL:
            return (self._head + self._tail).decode("utf-8", "replace")
        # Whole lines, and so whole characters too, unless a line is longer than either part.
        head = self._head[: self._head.rfind(b"\n") + 1] or self._head
        tail = self._tail[-_TAIL:]
        tail = tail[tail.find(b"\n") + 1 :]
        left_out = self._size - len(head) - len(tail)
        text = f"[opkiln left out {left_out} bytes of output here]\n".encode()
        middle = text if head.endswith(b"\n") else b"\n" + text
        return (head + middle + tail).decode("utf-8", "replace")


# Processes, as /proc shows them


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger. False if it cannot be seen."""
    return _status(pid)[:1] in ([b"T"], [b"t"])


def _status(pid: int | str) -> list[bytes]:
    """The fields of a process's ``stat``, from its state on; none if it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name may contain anything, so the fields begin after the last ")".
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _has_exited(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True  # other code has reaped it, and its status is lost


def _await_group_end(group: int) -> None:
    """Wait until killed processes are dead, so that none writes into a directory being removed.
    Waits two seconds at most: a process stuck in the kernel must not block us."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        states = map(_status, filter(str.isdigit, os.listdir("/proc")))
        members = [each[0] for each in states if each[2:3] == [b"%d" % group]]
        if all(state in (b"Z", b"X") for state in members):
            return
        time.sleep(0.005)


_PEAK = re.compile(rb"^VmHWM:\s*(\d+) kB", re.MULTILINE)


def _peak(pid: int) -> int:
    """The resident peak of a process so far, in bytes; 0 if it has just ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            match = _PEAK.search(file.read())
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


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


# Files without an end
#
# A compiler opens whatever an ``#include`` leads to. If that is a FIFO that nobody writes to, the
# compiler waits until its time limit. If it is ``/dev/zero`` or ``/dev/urandom``, it takes memory
# until there is none left. /proc shows the file that a process is opening, and those that are open.

# The numbers of open, openat and openat2, and which argument is the path.
_OPENING = {
    "x86_64": {2: 0, 257: 1, 437: 1},
    "aarch64": {56: 1, 437: 1},
}.get(os.uname().machine, {})
_ENDLESS = (os.makedev(1, 5), os.makedev(1, 7))  # /dev/zero and /dev/full
_RANDOM = (os.makedev(1, 8), os.makedev(1, 9))  # /dev/random and /dev/urandom
# A program may keep such a device open to take a few bytes from it now and then. One that has read
# this many bytes in all does more than that.
_MUCH = 64 << 20
_LONGEST = 4096  # bytes of a path
_HERE = 0xFFFFFF9C  # openat's descriptor for the working directory


def _find_endless(pid: int, made_below: str) -> tuple[str, str] | None:
    """(the name of a process, the file) if ``pid`` or one of its descendants reads a file without
    an end. FIFOs that a step made itself, ``made_below`` a directory, do not count."""
    for each in _tree(pid):
        path = _find_awaited_fifo(each) or _find_open_endless(each)
        if path is None or (made_below and path.startswith(made_below + "/")):
            continue
        try:
            with open(f"/proc/{each}/comm", encoding="utf-8", errors="replace") as file:
                return file.read().strip(), path
        except OSError:
            return f"pid {each}", path
    return None


def _find_awaited_fifo(pid: int) -> str | None:
    """The FIFO that a process waits for in ``open``."""
    try:
        with open(f"/proc/{pid}/syscall", "rb") as file:
            number, *arguments = file.read().split()
        place = _OPENING.get(int(number))
        if place is None:
            return None
        at = _HERE if place == 0 else int(arguments[0], 16) & 0xFFFFFFFF
        directory = f"/proc/{pid}/cwd" if at == _HERE else f"/proc/{pid}/fd/{at}"
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(int(arguments[place], 16))
            name = os.fsdecode(memory.read(_LONGEST).partition(b"\0")[0])
        if not stat.S_ISFIFO(os.stat(os.path.join(directory, name)).st_mode):
            return None
        return os.path.join(os.readlink(directory), name)
    except (OSError, ValueError):
        return None  # it runs, has just ended, or may not be looked at


def _find_open_endless(pid: int) -> str | None:
    """A named FIFO, or a device without an end, that a process has open."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return None
    for name in names:
        link = f"/proc/{pid}/fd/{name}"
        try:
            state = os.stat(link)
            if stat.S_ISCHR(state.st_mode) and (
                state.st_rdev in _ENDLESS
                or (state.st_rdev in _RANDOM and _count_bytes_read(pid) > _MUCH)
            ):
                return os.readlink(link)
            if stat.S_ISFIFO(state.st_mode) and (path := os.readlink(link)).startswith("/"):
                return path  # the other pipes have no path
        except OSError:
            continue  # it was just closed
    return None


def _count_bytes_read(pid: int) -> int:
    """The number of bytes that a process has read so far."""
    with open(f"/proc/{pid}/io", "rb") as file:
        return int(file.read().partition(b"rchar: ")[2].split()[0])


# Errors


def _start_error(argv: Sequence[str], cwd: str | None, error: Exception) -> ToolchainError:
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


def _lost_status_error(argv: Sequence[str]) -> BuildError:
    why = "another part of this process waits for any child: os.wait() or os.waitpid(-1, ...)"
    hint = "os.waitpid(pid, 0)    # there: wait for children that it started"
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        why = "this process ignores SIGCHLD, or the one that started it did"
        hint = "signal.signal(signal.SIGCHLD, signal.SIG_DFL)    # in Python, before this"
    return BuildError(f"the exit status of {argv[0]} is lost", why=why, hint=hint)


def _endless_error(argv: Sequence[str], name: str, path: str) -> InputError:
    what, why, hint = "a FIFO that nobody writes to", "", ["ls", "-lL", path]
    if path.startswith("/dev/"):
        what = "a device without an end"
        why = "a file that is compiled or included leads there\n"
        if "-c" in argv[:-1]:
            source = argv[list(argv).index("-c") + 1]
            hint = ["find", "-L", os.path.dirname(source) or ".", "-samefile", path]
    what = f"{argv[0]} was killed: {name} reads {path}, {what}"
    return InputError(what, why=why + _show_command(argv), hint=shlex.join(hint))


def timeout_error(argv: Sequence[str], timeout: float, how: str) -> BuildTimeout:
    hint = f"OPKILN_BUILD_TIMEOUT={max(60, int(timeout) * 2)}"
    return BuildTimeout(f"{argv[0]} {how} {timeout:g} s", why=_show_command(argv), hint=hint)


def cancel_error(argv: Sequence[str]) -> BuildCancelled:
    return BuildCancelled(f"{argv[0]} was killed: the build was cancelled", why=_show_command(argv))


def _show_command(argv: Sequence[str]) -> str:
    line = shlex.join(argv)
    return line if len(line) <= 2000 else f"{line[:2000]} ..."
