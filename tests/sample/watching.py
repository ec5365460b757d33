"""What a command and all that it starts ask of the file system, as the kernel sees it.

The kernel stops each of their system calls that names a file (seccomp's user notifications), and
this process writes down what it asks for, looks for itself, and lets it go on. So static programs
and system calls outside of the C library are seen too. It is the oracle for opkiln's observer,
which is preloaded and sees the C library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import stat
import struct
import subprocess
import threading
from typing import TYPE_CHECKING, NamedTuple

from sample import levels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPEN, LOOK, LINK, LIST, START = "open", "look", "link", "list", "start"


class _Call(NamedTuple):
    """A system call: what it is for, and which of its arguments are the directory that its path is
    relative to, the path, and its flags; -1 for none."""

    does: str
    at: int
    path: int
    flags: int = -1


_GENERIC = {  # by their numbers on newer architectures
    56: _Call(OPEN, 0, 1, 2), 437: _Call(OPEN, 0, 1), 79: _Call(LOOK, 0, 1, 3),
    291: _Call(LOOK, 0, 1, 2), 48: _Call(LOOK, 0, 1), 439: _Call(LOOK, 0, 1, 3),
    78: _Call(LINK, 0, 1), 221: _Call(START, -1, 0), 281: _Call(START, 0, 1),
    61: _Call(LIST, 0, -1), 49: _Call(LOOK, -1, 0), 43: _Call(LOOK, -1, 0),
    8: _Call(LOOK, -1, 0), 9: _Call(LINK, -1, 0), 264: _Call(LOOK, 0, 1), 27: _Call(LOOK, 0, 1),
}  # fmt: skip
_X86_64 = {
    257: _Call(OPEN, 0, 1, 2), 437: _Call(OPEN, 0, 1), 262: _Call(LOOK, 0, 1, 3),
    332: _Call(LOOK, 0, 1, 2), 269: _Call(LOOK, 0, 1), 439: _Call(LOOK, 0, 1, 3),
    267: _Call(LINK, 0, 1), 59: _Call(START, -1, 0), 322: _Call(START, 0, 1),
    80: _Call(LOOK, -1, 0), 137: _Call(LOOK, -1, 0), 191: _Call(LOOK, -1, 0),
    192: _Call(LINK, -1, 0), 303: _Call(LOOK, 0, 1), 254: _Call(LOOK, 0, 1),
    217: _Call(LIST, 0, -1), 78: _Call(LIST, 0, -1), 2: _Call(OPEN, -1, 0, 1),
    4: _Call(LOOK, -1, 0), 6: _Call(LOOK, -1, 0), 21: _Call(LOOK, -1, 0), 89: _Call(LINK, -1, 0),
}  # fmt: skip
_LSTAT = 6  # of x86-64: it does not follow a link, and has no flag that says so
_CALLS, _SECCOMP = (_X86_64, 317) if levels.IS_X86 else (_GENERIC, 277)

_RECEIVE, _ANSWER = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, _SEND
_NOTICE = struct.Struct("QIIiIQ6Q")  # struct seccomp_notif
_REPLY = struct.Struct("QqiI")  # struct seccomp_notif_resp
_GO_ON = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
_AT_CWD, _NO_FOLLOW = -100, 0x100
_libc = ctypes.CDLL(None, use_errno=True)


class Seen(NamedTuple):
    """Something that was asked of the file system. ``path`` is absolute, and spelled as it was;
    ``is_now`` is what was there: a file, a directory, a link that was not followed, nothing."""

    does: str
    path: str
    is_now: str
    writes: bool = False


class Unavailable(Exception):
    """This kernel, or the container that it runs, does not allow it."""


def watch(argv: Sequence[str], env: Mapping[str, str], cwd: str | os.PathLike[str]) -> list[Seen]:
    """Run a command, which must succeed, and give what it and all that it started asked for."""
    seen: list[Seen] = []
    ours, theirs = socket.socketpair()
    supervisor = threading.Thread(target=_supervise, args=(ours, seen), daemon=True)
    with ours, theirs:
        supervisor.start()
        try:
            subprocess.run(
                argv, env=dict(env), cwd=cwd, check=True, capture_output=True, text=True,
                preexec_fn=lambda: _hand_over(theirs),
            )  # fmt: skip
        except subprocess.SubprocessError as error:
            if isinstance(error, subprocess.CalledProcessError):
                raise AssertionError(error.stderr) from error
            raise Unavailable("the kernel lets nobody watch system calls") from error
        finally:
            theirs.close()
            supervisor.join()
    return seen


def _hand_over(theirs: socket.socket) -> None:
    """In the child, before it starts the command: have its calls stopped, and give the descriptor
    by which they are heard of to the parent."""
    filters = [_bpf(0x20, 0)]  # the number of a call
    for number in _CALLS:
        filters += [_bpf(0x15, number, 0, 1), _bpf(0x06, 0x7FC00000)]  # stop it
    filters.append(_bpf(0x06, 0x7FFF0000))  # let it pass
    code = ctypes.create_string_buffer(b"".join(filters))
    program = struct.pack("HxxxxxxQ", len(filters), ctypes.addressof(code))
    held = ctypes.create_string_buffer(program)
    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    listener = _libc.syscall(_SECCOMP, 1, 8, held)  # SECCOMP_FILTER_FLAG_NEW_LISTENER
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    socket.send_fds(theirs, [b"."], [listener])
    os.close(listener)


def _bpf(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def _supervise(ours: socket.socket, seen: list[Seen]) -> None:
    """Answer until no process is left that was started below the command."""
    _, given, _, _ = socket.recv_fds(ours, 1, 1)
    if not given:
        return
    (listener,) = given
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while waiting.poll()[0][1] & select.POLLIN:
        notice = bytearray(_NOTICE.size)
        with contextlib.suppress(OSError):  # it was killed, or interrupted and will ask again
            fcntl.ioctl(listener, _RECEIVE, notice)
            which, thread, _, number, _, _, *arguments = _NOTICE.unpack(notice)
            found = _look(thread, number, arguments)
            fcntl.ioctl(listener, _ANSWER, _REPLY.pack(which, 0, 0, _GO_ON))
            seen += [found] if found is not None else []
    os.close(listener)


def _look(thread: int, number: int, arguments: list[int]) -> Seen | None:
    call = _CALLS[number]
    path = _text(thread, arguments[call.path]) if call.path >= 0 else ""
    if not path and call.does != LIST:
        return None  # of a descriptor
    if not path.startswith("/"):
        at = ctypes.c_int(arguments[call.at]).value if call.at >= 0 else _AT_CWD
        try:
            base = os.readlink(f"/proc/{thread}/{'cwd' if at == _AT_CWD else f'fd/{at}'}")
        except FileNotFoundError:
            return None  # there is no such descriptor
        path = f"{base}/{path}" if path else base
    flags = arguments[call.flags] if call.flags >= 0 else 0
    opens = call.does == OPEN
    if opens and flags & os.O_PATH:
        return None
    writes = opens and (flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_CREAT))
    if call.does == LOOK:
        follows = not flags & _NO_FOLLOW and not (levels.IS_X86 and number == _LSTAT)
    else:
        follows = call.does != LINK
    return Seen(call.does, path, _what_is(path, follows=follows), writes)


def _what_is(path: str, *, follows: bool) -> str:
    try:
        mode = os.stat(path, follow_symlinks=follows).st_mode
    except OSError:
        return "nothing"
    if stat.S_ISLNK(mode):
        return "link"
    return "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device"


def _text(thread: int, address: int) -> str:
    if not address:
        return ""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        found = b""
        while b"\0" not in found:
            end = (address // 4096 + 1) * 4096  # the next page may not be there
            found += os.pread(memory.fileno(), end - address, address)
            address = end
        return os.fsdecode(found.partition(b"\0")[0])
