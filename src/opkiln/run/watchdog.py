"""The watchdog: a script that ``process.py`` starts, once per process that builds.

    python -I -S watchdog.py TOKEN PARENT

It outlives its parent for a moment and does what a killed parent cannot do. It kills every process
whose environment has ``OPKILN_BUILD_TOKEN=TOKEN``, and removes the parent's scratch directories.
The kernel's parent-death signal, which the observer asks for, is not enough: static programs do not
get it, nor programs that were started without the observer, and it removes nothing.

Standard input is a packet socket from the parent. A message is ``+PATH`` (a scratch directory),
``-PATH`` (no longer one) or ``quit`` (nothing to do; exit now). The watchdog acts when the socket
is closed or the parent ends. It watches both, because a forked child of the parent may keep the
socket open. Whoever starts the watchdog must block SIGINT, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

MARKER = "OPKILN_BUILD_TOKEN"

# Seconds between two scans of /proc. A process between fork and exec does not have its environment
# yet, so one scan misses it. It does not stay in that state this long.
_PAUSE = 0.05
# Seconds after which the watchdog gives up: the kernel may be unable to end a process that is stuck
# in a file system.
_PATIENCE = 30.0


def main(token: str, parent: int) -> None:
    """Wait until the parent ends, then kill what it started and remove its scratch directories."""
    scratch = wait_for_end(parent)
    if scratch is None:
        return
    kill_marked(token)
    if scratch:
        import shutil  # takes 10 ms, and only this needs it

        for path in scratch:
            # Nobody is left to read an error. gc removes what remains with the other leftovers.
            shutil.rmtree(path, ignore_errors=True)


def wait_for_end(parent: int) -> set[bytes] | None:
    """The scratch directories that were left when the parent ended; None if it sent ``quit``."""
    scratch: set[bytes] = set()
    poller = select.poll()
    poller.register(0, select.POLLIN)
    pidfd = open_pidfd(parent)
    if pidfd is not None:
        poller.register(pidfd, select.POLLIN)
    # Check this after pidfd_open: if the parent had ended before, its pid could already belong to
    # another process.
    gone = os.getppid() != parent
    while True:
        # With a pidfd the kernel wakes us. Without one (old kernel, sandbox) we poll.
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


def kill_marked(token: str) -> None:
    """SIGKILL every process that has the token, until two scans in a row find none."""
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
        # Open the pidfd before reading the environment. So the process that we kill is the one
        # that we checked, even if its pid is reused in between.
        pidfd = open_pidfd(int(name))
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                marked = entry in file.read().split(b"\0")
            if marked:
                found += 1
                if pidfd is None:
                    os.kill(int(name), signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            continue  # it has ended by itself, or it belongs to another user
        finally:
            if pidfd is not None:
                os.close(pidfd)
    return found


def open_pidfd(pid: int) -> int | None:
    """A descriptor that can be polled for the process's end, and by which it can be killed."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # Python was built without it, the kernel lacks it, or no such process


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
