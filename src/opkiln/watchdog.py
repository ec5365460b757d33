"""The watchdog: a script that ``process.py`` runs, once per process that builds.

    python -I -S watchdog.py TOKEN PARENT

It outlives its parent by a moment and does what a killed parent cannot: it ends every process
whose environment holds ``OPKILN_BUILD_TOKEN=TOKEN`` and removes the parent's scratch directories.
The kernel's parent-death signal is no substitute: it does not reach ``cc1plus`` under ``g++``, and
it fires when the thread that started the child ends.

Standard input is a packet socket from the parent. One message is ``+PATH`` (a scratch directory),
``-PATH`` (no longer one) or ``quit`` (nothing to do; end now). Its end, or the parent's, is the
signal to act: both are watched, because a forked child of the parent may hold the socket open.
SIGINT, SIGTERM and SIGHUP are blocked by whoever starts it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

MARKER = "OPKILN_BUILD_TOKEN"

# Between two looks at /proc. A process between fork and exec has not got its environment yet and
# escapes one look; it does not stay there this long.
_PAUSE = 0.05
# A process that the kernel cannot end (stuck in a file system) must not keep the watchdog for ever.
_PATIENCE = 30.0


def main(token: str, parent: int) -> None:
    """Wait for the parent's end, then end what it started and remove what it staged."""
    scratch = wait_for_end(parent)
    if scratch is None:
        return
    end_marked(token)
    if scratch:
        remove(scratch)


def wait_for_end(parent: int) -> set[bytes] | None:
    """The scratch directories left when the parent ended; None when it said ``quit``."""
    scratch: set[bytes] = set()
    poller = select.poll()
    poller.register(0, select.POLLIN)
    pidfd = _pidfd(parent)
    if pidfd is not None:
        poller.register(pidfd, select.POLLIN)
    # The check comes after pidfd_open: had the parent ended before it, its number could already
    # belong to another process.
    gone = os.getppid() != parent
    while True:
        # With a pidfd the kernel wakes us; without one (old kernel, sandbox) we look now and then.
        ready = poller.poll(0 if gone else 250 if pidfd is None else None)
        if any(fd == 0 for fd, _ in ready):
            message = os.read(0, 1 << 16)
            if not message:
                return scratch
            if message == b"quit":
                return None
            if message[:1] == b"+":
                scratch.add(message[1:])
            else:
                scratch.discard(message[1:])
        elif gone:
            return scratch  # every message that was sent has been read
        gone = gone or os.getppid() != parent or any(fd == pidfd for fd, _ in ready)


def end_marked(token: str) -> None:
    """SIGKILL every process that carries the token, until two looks in a row find none."""
    entry = f"{MARKER}={token}".encode()
    deadline = time.monotonic() + _PATIENCE
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        quiet = 0 if _kill_once(entry) else quiet + 1
        time.sleep(_PAUSE)


def _kill_once(entry: bytes) -> int:
    found = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # The pidfd first, the environment second: so the process that is killed is the one that
        # was looked at, whatever became of its number in between.
        pidfd = _pidfd(int(name))
        try:
            if entry in _environment(name):
                found += 1
                if pidfd is None:
                    os.kill(int(name), signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself
        finally:
            if pidfd is not None:
                os.close(pidfd)
    return found


def _environment(pid: str) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []  # gone, or somebody else's: not ours to end either way


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # built without it; not in this kernel; no such process


def remove(scratch: set[bytes]) -> None:
    """Remove directories whose owner is dead."""
    import shutil  # 10 ms that only this path needs

    for path in scratch:
        # Nobody is left to be told of an error; what stays is swept with the other leftovers.
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
