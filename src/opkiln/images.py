"""Files whose times say nothing: those of images, whose maker chose every time.

Elsewhere a kernel writes a file's change time whenever the file changes, so equal times mean an
unchanged file. In squashfs, erofs and other images two different files may agree in inode, size and
all times. And one image may be mounted in place of another, under the same device number and the
same mount id. Such a file is known by its contents. That it is still the same file is remembered
for as long as the image stays mounted: the kernel gives every mount a number that it never uses
twice (since 6.8), and every attached disk (since 5.15).

- An *image* is a file system that cannot be written (``_IMAGES``), or a disk's or FUSE's that is
  mounted read-only. Of these, files with times as makers of images leave them count: no change time
  of its own, or one in whole seconds. Others were written by a kernel.
- Of an overlay, the files of lower layers on other file systems, and those with whole seconds.
- A file of FUSE, whose times a program makes up, and one of a file system that counts in whole
  seconds and can be written, is known by its contents alone: it may have changed within the second.

Not noticed: a disk that is mounted writable, made by a tool that sets all times, and exchanged for
another; an image that a server exports; an image file that is overwritten while it is mounted.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_IMAGES = frozenset(("cramfs", "erofs", "iso9660", "romfs", "squashfs", "udf"))

_SECOND = 1_000_000_000
# Before the earliest time of any file system, so that no change time is taken for a mount.
_FIRST = -(1 << 62)

_known: dict[tuple[str, int], Any] = {}  # by question and device


def forget() -> None:
    """A decision or a build begins. Since the last one, something may have been mounted."""
    _known.clear()


def change(path: str, found: os.stat_result) -> int | None:
    """What changes whenever a file does: its change time, or the mount of the image it is in.

    ``found`` is what ``stat`` says of it. None if nothing does: then its contents decide.
    """
    changed = found.st_ctime_ns
    whole = changed % _SECOND == 0
    device = found.st_dev

    def once(question: str, ask: Callable[..., Any], *about: object) -> Any:
        answer = _known.get((question, device))  # another thread may forget
        if answer is None:
            answer = _known[question, device] = ask(path, *about)
        return answer

    kind, read_only, own = once("mount", _mount)
    by_maker = whole or changed == found.st_mtime_ns
    if kind == "overlay" and not read_only:
        by_maker = by_maker and (whole or device != own)
    elif kind not in _IMAGES and not read_only:
        coarse = whole and not once("fractions", _has_fractions, device)
        return None if coarse or kind.startswith("fuse") else changed
    return (once("mark", _mark, device) or None) if by_maker else changed


def _has_fractions(path: str, device: int) -> bool:
    """Whether a file system counts less than seconds, as far as the directories above a file tell.
    A file's own time may be by whoever made the disk's image."""
    above = os.path.realpath(path)
    while above != os.path.dirname(above):
        above = os.path.dirname(above)
        status = os.stat(above)
        if status.st_dev != device:
            return False
        if status.st_ctime_ns % _SECOND:
            return True
    return False


def is_mount(number: int) -> bool:
    """Whether a number of ``change`` stands for a mount."""
    return number < _FIRST


def _mount(path: str) -> tuple[str, bool, int]:
    """(type, whether it is read-only, device) of the file system that a path leads to.

    Read-only only counts for a disk, FUSE and an overlay: a network file system is written to
    elsewhere.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            told = _read(f"/proc/self/fdinfo/{fd}")
        finally:
            os.close(fd)
        number = told.partition("mnt_id:")[2].split(None, 1)[0]
        for line in _read("/proc/self/mountinfo").splitlines():
            first, _, last = line.partition(" - ")
            words, more = first.split(" "), last.split(" ")
            if words[0] == number:
                major, minor = map(int, words[2].split(":"))
                local = more[0].startswith(("overlay", "fuse")) or more[1].startswith("/dev/")
                read_only = local and "ro" in more[-1].split(",")
                return more[0], read_only, os.makedev(major, minor)
    except (OSError, ValueError, IndexError):
        pass  # no /proc: the times alone must tell
    return "", False, 0


def _mark(path: str, device: int) -> int:
    """A number that no other mount has: no other image, and not this one mounted again. 0 if this
    kernel has none."""
    try:
        boot = _read("/proc/sys/kernel/random/boot_id")
        mount = _unique_id(path)
        if mount is None:
            if not os.major(device):
                return 0
            place = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/diskseq"
            mount = f"disk {_read(place)}"
    except OSError:
        return 0
    digest = hashlib.sha256(f"{boot} {mount}".encode()).digest()
    return _FIRST - 1 - int.from_bytes(digest[:7], "big")


_UNIQUE_ID = 0x4000  # STATX_MNT_ID_UNIQUE
_AT_FDCWD = -100


def _unique_id(path: str) -> str | None:
    import ctypes

    statx = getattr(ctypes.CDLL(None), "statx", None)
    found = ctypes.create_string_buffer(256)
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _UNIQUE_ID, found) != 0:
        return None
    if not int.from_bytes(found.raw[:4], sys.byteorder) & _UNIQUE_ID:
        return None
    return found.raw[0x90:0x98].hex()  # stx_mnt_id


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
