"""Reads a file piece by piece, and checks every piece against the file's size.

A memory mapping would be simpler, but SIGBUS would kill the process if the file shrinks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any

from opkiln.errors import LoadError

# A path, or the contents of a file.
File = str | os.PathLike[str] | bytes

# No alignment is larger. A longer run of zeros is a hole in a damaged file.
_LONGEST_PADDING = 1 << 21
_CHUNK = 1 << 16


class ByteSource:
    """A readable range of bytes with a name for messages."""

    def __init__(self, name: str, size: int, *, fd: int = -1, held: bytes = b"") -> None:
        self.name = name
        self.size = size
        self._fd = fd
        self._held = held

    def until(self, end: int) -> ByteSource:
        """The same bytes at the same offsets, up to ``end``: one section or container."""
        return ByteSource(self.name, min(end, self.size), fd=self._fd, held=self._held)

    def read(self, offset: int, size: int, what: str) -> bytes:
        """Exactly ``size`` bytes. Raises LoadError, which names ``what``, if the file is too
        short."""
        if offset + size > self.size:
            raise self.damage(
                f"{what}: {size} bytes at {offset:#x} reach past the end at {self.size:#x}"
            )
        if self._fd < 0:
            return self._held[offset : offset + size]
        data = b""
        while len(data) < size:
            try:
                piece = os.pread(self._fd, size - len(data), offset + len(data))
            except OSError as error:
                raise self.damage(f"{what}: {error.strerror} at {offset:#x}") from error
            if not piece:
                raise self.damage(
                    f"{what}: the file was cut to {offset + len(data):#x} bytes while it was read"
                )
            data += piece
        return data

    def unpack(self, layout: Struct, offset: int, what: str) -> tuple[Any, ...]:
        """The fields of ``layout`` at ``offset``."""
        return layout.unpack(self.read(offset, layout.size, what))

    def skip_padding(self, offset: int, what: str) -> int:
        """The offset of the next byte that is not zero, or the end."""
        start = offset
        while offset < self.size:
            chunk = self.read(offset, min(_CHUNK, self.size - offset), what)
            rest = chunk.lstrip(b"\0")
            offset += len(chunk) - len(rest)
            if offset - start > _LONGEST_PADDING:
                raise self.damage(f"{what}: nothing but zeros from {start:#x} to {offset:#x}")
            if rest:
                break
        return offset

    def damage(self, why: str) -> LoadError:
        """The error for a file that does not match its own headers."""
        from shlex import quote

        return LoadError(
            f"{self.name} is damaged, or of an unknown kind",
            why=why,
            hint=f"readelf -hSW {quote(self.name)}",
        )


@contextmanager
def open_source(file: File) -> Iterator[ByteSource]:
    """Open a regular file, or wrap the given bytes. Raises LoadError if it cannot be opened."""
    if isinstance(file, bytes):
        yield ByteSource("<bytes>", len(file), held=file)
        return
    name = os.fspath(file)
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise LoadError(f"{name!r} cannot be read", why=str(error)) from error
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise LoadError(f"{name} is not a regular file")
        yield ByteSource(name, state.st_size, fd=fd)
    finally:
        os.close(fd)
