"""Interpreters that are forked, not started: importing torch takes more than a second.

A server that has imported torch, and nothing else, forks for each request. The child then behaves
as ``python`` with the same arguments: ``-c CODE``, ``-m MODULE`` or a script, then its arguments.
It cannot differ in what a process reads when it starts, so ``Fork`` is only for environments that
``suits`` accepts. A second server stands for ``python -S``: it has no torch, and has imported what
a load and a rank of a job import of opkiln.

Run as a program, this file is the server. Its arguments are the path of its socket and the modules
to import. It ends when its standard input does.
"""

from __future__ import annotations

import array
import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Read by the dynamic linker, the C library, OpenMP or the interpreter before any code runs.
_READ_AT_START = (
    "LD_", "MALLOC_", "GLIBC_", "OMP_", "KMP_", "GOMP_", "MKL_", "PYTHON", "LC_", "LANG",
)  # fmt: skip
_FOLLOWED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_LOADING = (
    "opkiln.loading.loader", "opkiln.decision.search", "opkiln.building.build",
    "opkiln.cluster.ensure", "opkiln.cluster.work",
)  # fmt: skip


def suits(env: Mapping[str, str]) -> bool:
    """Whether a fork of the server can stand for a process that starts in this environment."""
    names = {*env, *_started_with()}
    return all(
        env.get(name) == _started_with().get(name)
        for name in names
        if name.startswith(_READ_AT_START) and name not in _FOLLOWED
    )


class Fork(subprocess.Popen[str]):
    """A process that the server forked, with Popen's interface. ``args`` are those of ``python``,
    without the interpreter. ``bare``: without site-packages, so without torch."""

    def __init__(self, args: Sequence[str], *, bare: bool = False, **options: Any) -> None:
        self._status: socket.socket | None = None
        self._bare = bare
        super().__init__(list(args), **options)

    def _execute_child(self, args: list[str], *given: Any) -> None:  # type: ignore[override]
        # The parameters of CPython's own method, by position.
        _executable, _preexec, _close, _pass, cwd, env, *_rest = given
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[9:15]
        ours = (p2cwrite, c2pread, errread)
        theirs = (p2cread, c2pwrite, errwrite)
        streams = [number if fd == -1 else fd for number, fd in enumerate(theirs)]
        request = {"args": args, "env": dict(os.environ if env is None else env),
                   "cwd": os.fspath(cwd or os.getcwd())}  # fmt: skip
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(_server(self._bare))
        text = json.dumps(request).encode()
        head = len(text).to_bytes(8, "little")
        connection.sendmsg(
            [head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
        )
        connection.sendall(text)
        self.pid = int.from_bytes(_exactly(connection, 8), "little")
        self._status = connection
        self._child_created = True
        # The ends of pipes that Popen has made; other files are the caller's. With stderr=STDOUT
        # two of them are one.
        for fd in {fd for mine, fd in zip(ours, theirs, strict=True) if mine != -1}:
            os.close(fd)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._end(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _end(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._status is not None:
            self._status.settimeout(None)
            with selectors.DefaultSelector() as ready:
                ready.register(self._status, selectors.EVENT_READ)
                if not ready.select(timeout):
                    return None
            told = self._status.recv(8)
            # The server is gone, and with it its children.
            self.returncode = int.from_bytes(told, "little", signed=True) if told else -9
            self._status.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        more = connection.recv(count - len(parts))
        if not more:
            raise EOFError("the other side has ended")
        parts += more
    return parts


@functools.cache
def _started_with() -> dict[str, str]:
    """The environment of the server: this process's, when it was first asked for."""
    return {name: text for name, text in os.environ.items() if name not in _FOLLOWED}


@functools.cache
def _server(bare: bool) -> str:
    """The socket of this process's server, which is started at the first request."""
    from sample import child, temporary

    path = str(temporary.directory("opkiln-forks-") / "socket")
    env = {**_started_with(), _AUTOLOAD: "0", "PYTHONPATH": str(child.SOURCE) if bare else ""}
    server = subprocess.Popen(
        [sys.executable, *(["-S"] if bare else []), os.path.abspath(__file__), path,
         *(_LOADING if bare else ["torch"])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
    )  # fmt: skip
    _alive.append(server)
    assert server.stdout is not None
    if not server.stdout.readline():
        raise RuntimeError(f"the server of forks ended with {server.wait()}")
    return path


_alive: list[subprocess.Popen[bytes]] = []  # its input stays open as long as this process lives


def leave_writing_to_the_kernel() -> None:
    """Let fsync do nothing in this process: on a disk it takes 5 to 10 ms, and a build makes six.

    What a power failure may leave is tested where each call is seen: faults/test_crash_points.py.
    """
    os.fsync = lambda fd: None


# The server


def _serve(path: str, modules: list[str]) -> None:
    import importlib
    import weakref

    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # a collection in a fork would write to, and so copy, every page with an object
    leave_writing_to_the_kernel()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # torch takes its registrations back, one by one
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        for each in (listening, wake, sys.stdin):
            ready.register(each, selectors.EVENT_READ)
        os.write(1, b"ready\n")
        while True:
            for key, _ in ready.select():
                if key.fileobj is sys.stdin:
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fileobj is wake:
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                    _reap(children)
                else:
                    connection, _ = listening.accept()
                    inherited = [listening, wake, woken, connection, *children.values()]
                    children[_fork(connection, inherited)] = connection


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as connection, contextlib.suppress(OSError):
            connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))


def _fork(connection: socket.socket, inherited: list[socket.socket]) -> int:
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(12))
    streams = array.array("i")
    streams.frombytes(ancillary[0][2][:12])
    request = json.loads(_exactly(connection, int.from_bytes(head, "little")))
    pid = os.fork()
    if pid != 0:
        for fd in streams:
            os.close(fd)
        connection.sendall(pid.to_bytes(8, "little"))
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in inherited:
        each.close()
    _become(request, list(streams))
    raise AssertionError("it has ended")


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Be the interpreter that was asked for, to its end."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in {*streams} - {0, 1, 2}:
        os.close(fd)
    # As in a process that was started: file objects of its own, of the kind that pipes get.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    env = request["env"]
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = env.get("PYTHONPYCACHEPREFIX") or None
    code = 1
    try:
        code = _interpret(request["args"], env)
    finally:
        with contextlib.suppress(BaseException):
            import threading

            threading._shutdown()  # type: ignore[attr-defined]
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _interpret(args: list[str], env: dict[str, str]) -> int:
    import runpy
    import types

    kind, rest = args[0], args[1:]
    path = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[0:1] = path  # the first one is this file's directory
    try:
        if "torch" in sys.modules and env.get(_AUTOLOAD, "1") == "1":
            sys.modules["torch"]._import_device_backends()
        if kind == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest[1:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__builtins__ = __builtins__  # type: ignore[attr-defined]
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = ["-m", *rest[1:]]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
            sys.argv = [kind, *rest]
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return int(ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # As the interpreter ends: by the signal, after the traceback.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
