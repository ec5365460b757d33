"""Digests of values and files, and the stat signature that saves re-reading a file.

Everything that enters a key goes through ``encode``. It writes types and lengths, so two different
values never give the same bytes (``-DA -DB`` is not ``-DA-DB``). It also writes a version, so a
change here changes every key.
"""

from __future__ import annotations

import hashlib
import os
import time
from itertools import chain
from operator import attrgetter
from typing import Any

from opkiln.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

ENCODING = 1

# In hex digits: 160 bits of SHA-256. That is short enough for paths and long enough to be unique.
KEY_LENGTH = 40

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


def sha256_file(path: str | int) -> str:
    """SHA-256 of a file's contents. Raises OSError."""
    digest = hashlib.sha256()
    fd = path if isinstance(path, int) else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while chunk := os.read(fd, 1 << 17):
            digest.update(chunk)
    finally:
        if not isinstance(path, int):
            os.close(fd)
    return digest.hexdigest()


class Signature(Record):
    """A file's ``stat``, and when its contents were read.

    Equal signatures mean equal contents only if the file was not being changed when it was read: a
    write in the same clock tick leaves the times the same. So a signature is not trusted if its
    times are within two seconds of ``read_at``, or after it (a skewed clock). Then the file is
    hashed. A program cannot set back the change time, so an edit under an old mtime is noticed.
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
        size, mtime_ns, ctime_ns, inode = signed((path,))
        return cls(size, mtime_ns, ctime_ns, inode, read_at)

    @property
    def settled(self) -> bool:
        """Whether the file had come to rest when it was read."""
        return max(self.mtime_ns, self.ctime_ns) <= self.read_at - _SETTLED_NS

    def holds(self, path: str) -> bool:
        """Whether the file is certainly unchanged. Raises OSError if it is gone."""
        return self.settled and signed((path,)) == list(self[:-1])


_SIGNED = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")


def signed(paths: Iterable[str]) -> list[int]:
    """The signatures of files as they are now, without ``read_at``, one after the other. Raises
    OSError if one is gone."""
    return list(chain.from_iterable(map(_SIGNED, map(os.stat, paths))))
