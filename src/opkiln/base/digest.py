"""Reads files without waiting, compares them by digest or signature, writes them in one step.

Only regular files are read: opening a FIFO would wait for a writer, and ``/dev/zero`` has no end.

Everything that enters a key goes through ``encode``. It writes types and lengths, so two different
values never give the same bytes (``-DA -DB`` is not ``-DA-DB``). It also writes a version, so a
change here changes every key.

A reader sees the old file or all of the new one, never a part. A full disk leaves the old file and
nothing else. A kill may also leave a hidden file beside it, ``.NAME.PID-…``. (In the store, gc
removes those.)
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from operator import attrgetter
from typing import Any, BinaryIO

from opkiln.base.lazy import Record
from opkiln.base.trust import make_private

# Files in images: their times prove nothing, because the maker of the image chose all of them.
#
# On other file systems a kernel writes the change time whenever a file changes, so equal times mean
# an unchanged file. In squashfs, erofs and other images two files may agree in inode, size and all
# times. And one image may be mounted in place of another, under the same device number and mount
# id. Such a file is known by its contents, for as long as the image stays mounted: the kernel gives
# every mount (since 6.8) and every attached disk (since 5.15) a number that it never uses twice.
#
# - An *image* is a file system that cannot be written (``_IMAGES``), or a disk's or FUSE's that is
#   mounted read-only. In it, this is about files with times as makers of images leave them: a
#   change time equal to the modification time, or in whole seconds. A kernel wrote the others.
# - In an overlay, it is about files of lower layers on other file systems, and those with whole
#   seconds.
# - A file of FUSE, whose times a program makes up, and one of a writable file system that counts in
#   whole seconds, are known by their contents alone: they may have changed within a second.
#
# Not noticed: a disk that is mounted writable, made by a tool that sets all times, and exchanged
# for another; an image that a server exports; an image file that is overwritten while mounted.

_IMAGES = frozenset(("cramfs", "erofs", "iso9660", "romfs", "squashfs", "udf"))

_SECOND = 1_000_000_000
# Before the earliest time of any file system, so that no change time is taken for a mount.
_FIRST = -(1 << 62)

_known: dict[tuple[str, int], Any] = {}  # by question and device


def forget_mounts() -> None:
    """Forget what is known of mounts. Called when a decision or a build begins: something may have
    been mounted since the last one."""
    _known.clear()


def change_mark(path: str, found: os.stat_result) -> int | None:
    """A number that changes whenever a file does: its change time, or the mount of its image.
    ``found`` is the file's ``stat``. None if there is no such number: then its contents decide."""
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


def has_own_times(path: str, found: os.stat_result) -> bool:
    """Whether ``change_mark`` of a file is its change time, as far as its device tells."""
    known = _known.get(("own times", found.st_dev))
    if known is None:
        kind, read_only, _ = _mount(path)
        special = read_only or kind == "overlay" or kind in _IMAGES or kind.startswith("fuse")
        known = not special and _has_fractions(path, found.st_dev)
        _known["own times", found.st_dev] = known
    return bool(known)


def _has_fractions(path: str, device: int) -> bool:
    """Whether a file system counts fractions of seconds, judged by the directories above a file.
    The file's own time may have been chosen by the maker of the disk's image."""
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
    """Whether a result of ``change_mark`` is the number of a mount."""
    return number < _FIRST


def _mount(path: str) -> tuple[str, bool, int]:
    """(type, whether it is read-only, device) of the file system that a path leads to. Read-only
    only counts for a disk, FUSE and an overlay: other hosts write to a network file system."""
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
    """The number of a mount, which no other mount has, not even of the same image. 0 if this kernel
    has no such number."""
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


ENCODING = 1

# In hex digits: 160 bits of SHA-256. That is short enough for paths and long enough to be unique.
KEY_LENGTH = 40

LARGEST = 8 << 30  # bytes of a file that is hashed: a library, an archive, a compiler
LARGEST_RECORD = 256 << 20  # bytes of a file that is read whole: a manifest, a source
LARGEST_BUNDLE = 1 << 42

_SETTLED_NS = 2_000_000_000  # FAT's clock, the coarsest in use, ticks every two seconds


def encode(value: Any) -> bytes:
    """An injective encoding of None, bool, int, str, bytes and tuples, sets and dicts of these."""
    out: list[bytes] = []
    _encode(value, out)
    return b"".join(out)


def _encode(value: Any, out: list[bytes]) -> None:
    if isinstance(value, str):
        # surrogatepass loses nothing: paths that are not Unicode contain lone surrogates.
        data = value.encode("utf-8", "surrogatepass")
        out.append(b"s%d:%b" % (len(data), data))
    elif isinstance(value, (tuple, list)):
        out.append(b"(%d:" % len(value))
        for item in value:
            if type(item) is str:  # as most are: without a call
                data = item.encode("utf-8", "surrogatepass")
                out.append(b"s%d:%b" % (len(data), data))
            else:
                _encode(item, out)
    elif value is None:
        out.append(b"n")
    elif value is True or value is False:
        out.append(b"t" if value else b"f")
    elif isinstance(value, int):
        out.append(b"i%d;" % value)
    elif isinstance(value, bytes):
        out.append(b"b%d:" % len(value))
        out.append(value)
    elif isinstance(value, (set, frozenset)):
        out.append(b"{%d:" % len(value))
        out.extend(sorted(encode(item) for item in value))
    elif isinstance(value, dict):
        out.append(b"<%d:" % len(value))
        out.extend(sorted(encode(item) for item in value.items()))
    else:
        raise TypeError(f"{type(value).__name__} cannot be part of a key")


def key(kind: str, value: Any) -> str:
    """The key of a value: the first characters of its SHA-256, in hex."""
    return hashlib.sha256(encode((ENCODING, kind, value))).hexdigest()[:KEY_LENGTH]


class UnusableFile(OSError):
    """A file that is not regular, or too large to be read."""


@contextmanager
def open_regular(
    path: str, limit: int = LARGEST, flags: int = 0
) -> Iterator[tuple[int, os.stat_result]]:
    """(descriptor, its status) of a regular file of at most ``limit`` bytes. Never waits. Raises
    UnusableFile for any other file, and OSError if it cannot be opened."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer. It does not affect regular files.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # the answer for a socket, and for a device without a driver
            raise UnusableFile(errno.EINVAL, "it is not a regular file", path) from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _unusable(found, path)
        if found.st_size > limit:
            raise _too_large(found.st_size, limit, path)
        yield fd, found
    finally:
        os.close(fd)


def _unusable(found: os.stat_result, path: str) -> OSError:
    if stat.S_ISDIR(found.st_mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    fifo, device = stat.S_ISFIFO(found.st_mode), stat.S_ISCHR(found.st_mode)
    kind = "a FIFO" if fifo else "a device" if device else "a special file"
    return UnusableFile(errno.EINVAL, f"it is {kind}, not a regular file", path)


def _too_large(size: int, limit: int, path: str) -> UnusableFile:
    text = f"it has {size} bytes, more than the limit of {limit}"
    return UnusableFile(errno.EFBIG, text, path)


def sha256_file(path: str | int, limit: int = LARGEST) -> str:
    """SHA-256 of the contents of a regular file, or of what a descriptor is open on. Never waits.
    Raises UnusableFile for another kind of file and for one that is larger than ``limit`` bytes,
    and OSError if it cannot be read. The caller has checked a descriptor."""
    if isinstance(path, int):
        return _sha256(path, -1, limit, path)
    with open_regular(path, limit) as (fd, found):
        return _sha256(fd, found.st_size, limit, path)


def _sha256(fd: int, size: int, limit: int, path: str | int) -> str:
    digest = hashlib.sha256()
    total = 0
    while chunk := os.read(fd, 1 << 17):
        digest.update(chunk)
        total += len(chunk)
        # The size saves the read that would only find the end. /proc gives 0 for every file.
        if total == size:
            break
        if total > limit:
            raise _too_large(total, limit, str(path))
    return digest.hexdigest()


def read_file(path: str, limit: int = LARGEST_RECORD) -> bytes:
    """The contents of a regular file. Never waits. Raises as ``sha256_file``."""
    with open_regular(path, limit) as (fd, found):
        return read_opened(fd, found, limit, path)


def read_opened(fd: int, found: os.stat_result, limit: int, path: str) -> bytes:
    """The contents of a file that ``open_regular`` opened."""
    data = os.read(fd, found.st_size + 1)
    if len(data) == found.st_size:
        return data
    parts, total = [data], len(data)  # it is growing, or was cut, or gives its size as 0
    while chunk := os.read(fd, 1 << 17):
        parts.append(chunk)
        total += len(chunk)
        if total > limit:
            raise _too_large(total, limit, path)
    return b"".join(parts)


class Signature(Record):
    """A file's ``stat``, and when its contents were read.

    Equal signatures mean equal contents only if the file was not being changed when it was read: a
    write in the same clock tick leaves the times the same. So a signature is not trusted if its
    times are within two seconds of ``read_at``, or after it (a skewed clock). Then the file is
    hashed. A program cannot set back the change time, so an edit under an old mtime is noticed.

    For files in images, the number of the mount replaces the change time. If the kernel has no such
    number, the signature is not trusted.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    read_at: int  # time_ns just before the contents were read

    @classmethod
    def of(cls, path: str) -> Signature:
        """The signature of a file that is about to be read. Raises OSError."""
        read_at = time.time_ns()
        found = os.stat(path)
        changed = change_mark(path, found)
        if changed is None:
            changed, read_at = found.st_ctime_ns, _NEVER
        return cls(found.st_size, found.st_mtime_ns, changed, found.st_ino, read_at)

    @property
    def settled(self) -> bool:
        """Whether the file had come to rest when it was read."""
        return self.settles_at <= self.read_at

    @property
    def settles_at(self) -> int:
        """The ``time_ns`` at which a file with these times comes to rest; some never do."""
        if self.known_by_contents:
            return -_NEVER
        return max(self.mtime_ns, self.ctime_ns) + _SETTLED_NS

    @property
    def known_by_contents(self) -> bool:
        """Whether only its contents show that a file has changed."""
        return self.read_at == _NEVER

    @property
    def in_image(self) -> bool:
        """Whether the file is in an image."""
        return is_mount(self.ctime_ns)

    @staticmethod
    def recorded_holds(path: str, recorded: Sequence[int]) -> bool:
        """Whether ``holds`` is certain of a recorded signature, from one look. Raises OSError."""
        size, mtime, ctime, inode, read_at = recorded
        if mtime + _SETTLED_NS > read_at or ctime + _SETTLED_NS > read_at:
            return False
        found = os.stat(path)
        return (
            (found.st_ctime_ns, found.st_size, found.st_mtime_ns, found.st_ino)
            == (ctime, size, mtime, inode)
        ) and has_own_times(path, found)

    def holds(self, path: str) -> bool:
        """Whether the file is certainly unchanged. Raises OSError if it is gone."""
        return Signature.recorded_holds(path, self) or (
            self.settled and Signature.of(path)[:-1] == self[:-1]
        )


_NEVER = -(1 << 63)  # a file that was read then would never have come to rest

_SIGNED = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")


def current_signatures(paths: Iterable[str]) -> list[int]:
    """The signatures of files as they are now, without ``read_at``, as one list. Not for files in
    images. Raises OSError if one is gone."""
    return list(chain.from_iterable(map(_SIGNED, map(os.stat, paths))))


FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk


def write_private(path: str, data: bytes) -> None:
    """Write a file for this user alone. Creates its directory. Raises OSError."""
    make_private(os.path.dirname(path))
    with open_replacement(path, 0o600) as file:
        file.write(data)


def replace(path: str, data: bytes) -> None:
    """Write a file of the user's. An existing file keeps its mode, and a symbolic link to it stays.
    Raises OSError."""
    path = os.path.realpath(path)
    with open_replacement(path) as file:
        file.write(data)
        with suppress(FileNotFoundError):
            os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))


def is_temporary(path: str) -> bool:
    """Whether a file has the name of a replacement that was not finished."""
    return re.search(r"\.[0-9]+-[0-9a-f]{12}$", path) is not None


@contextmanager
def open_replacement(path: str, mode: int = 0o666, *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a new file that becomes ``path`` when the block ends; with ``sync``, once it is on disk.
    After an error in the block, or on a full disk, ``path`` is unchanged. Raises OSError."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{os.getpid()}-{os.urandom(6).hex()}")
    try:
        with open(temporary, "x+b", opener=lambda name, how: os.open(name, how, mode)) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
