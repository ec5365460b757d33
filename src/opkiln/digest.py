"""Digests of values and files, and the stat signature that saves re-reading a file.

Files are opened here without waiting, and only regular ones are read: opening a FIFO would wait for
a writer, and ``/dev/zero`` has no end.

Everything that enters a key goes through ``encode``. It writes types and lengths, so two different
values never give the same bytes (``-DA -DB`` is not ``-DA-DB``). It also writes a version, so a
change here changes every key.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        out.append(b"s%d:" % len(data))
        out.append(data)
    elif isinstance(value, (tuple, list)):
        out.append(b"(%d:" % len(value))
        for item in value:
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
    """A file that is not read: it is not a regular file, or it is too large."""


@contextmanager
def open_regular(
    path: str, limit: int = LARGEST, flags: int = 0
) -> Iterator[tuple[int, os.stat_result]]:
    """(descriptor, its status) of a regular file of at most ``limit`` bytes. Never waits.

    Raises UnusableFile for any other file, and OSError if it cannot be opened.
    """
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
    """SHA-256 of the contents of a regular file, or of what a descriptor is open on.

    Never waits. Raises UnusableFile for another kind of file and for one that is larger than
    ``limit`` bytes, and OSError if it cannot be read. The caller has checked a descriptor.
    """
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


def read_file(path: str, limit: int = LARGEST_RECORD, flags: int = 0) -> bytes:
    """The contents of a regular file. Never waits. Raises as ``sha256_file``."""
    with open_regular(path, limit, flags) as (fd, found):
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

    The times of an image's files say nothing (``images``). There the mount takes the place of the
    change time, and the signature is not trusted if the mount cannot be told from another.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    read_at: int  # time_ns just before the contents were read

    @classmethod
    def of(cls, path: str) -> Signature:
        """The signature of a file that is about to be read. Raises OSError."""
        from opkiln import images  # not for a hit, which compares what ``signed`` gives

        read_at = time.time_ns()
        found = os.stat(path)
        changed = images.change(path, found)
        if changed is None:
            changed, read_at = found.st_ctime_ns, _NEVER
        return cls(found.st_size, found.st_mtime_ns, changed, found.st_ino, read_at)

    @property
    def settled(self) -> bool:
        """Whether the file had come to rest when it was read."""
        return self.settles_at <= self.read_at

    @property
    def settles_at(self) -> int:
        """When a file with these times comes to rest: a ``time_ns``. Some never do."""
        if self.known_by_contents:
            return -_NEVER
        return max(self.mtime_ns, self.ctime_ns) + _SETTLED_NS

    @property
    def known_by_contents(self) -> bool:
        """Whether nothing but its contents tells this file from another."""
        return self.read_at == _NEVER

    @property
    def in_image(self) -> bool:
        """Whether it holds for as long as an image is mounted."""
        from opkiln import images

        return images.is_mount(self.ctime_ns)

    def holds(self, path: str) -> bool:
        """Whether the file is certainly unchanged. Raises OSError if it is gone."""
        return self.settled and Signature.of(path)[:-1] == self[:-1]


_NEVER = -(1 << 63)  # a file that was read then would never have come to rest

_SIGNED = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")


def signed(paths: Iterable[str]) -> list[int]:
    """The signatures of files as they are now, without ``read_at``, one after the other. Not for
    files of images. Raises OSError if one is gone."""
    return list(chain.from_iterable(map(_SIGNED, map(os.stat, paths))))
