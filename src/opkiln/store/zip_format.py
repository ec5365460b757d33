"""The form in which opkiln writes ZIP archives: bundles (members stored) and wheels (deflated).

Members follow one another, without times, comments or extra fields. Then comes the directory. So
the same files give the same bytes, and the headers determine every byte around the members' data.
``store.archive`` compares bundles with that form. (Two versions of zlib may deflate differently.)
"""

from __future__ import annotations

import hashlib
import stat
import zlib
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import BinaryIO

from opkiln.base.lazy import Record

STORED, DEFLATED = 0, 8

# The limits of ZIP without its 64-bit extension, which not every reader supports. The size leaves
# some room for the directory.
LARGEST = (4 << 30) - (64 << 20)
MOST_MEMBERS = 65_000

LOCAL = Struct("<4sHHHHHIIIHH")
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_END = Struct("<4sHHHHIIH")
_VERSION, _UTF8 = 20, 0x800
_UNIX, _DATE = 3, 0x21  # 1 January 1980, the first day that ZIP can express
_LEVEL, _RAW = 9, -15
_CHUNK = 1 << 20


class MemberHeader(Record):
    """One member of an archive, as its headers describe it."""

    name: str
    size: int
    crc: int
    offset: int  # where the header begins
    packed: int  # the size of the data in the archive
    method: int = STORED
    mode: int = 0o644


def stored_header(name: str, size: int, crc: int, offset: int) -> MemberHeader:
    """The header of a member that is not compressed."""
    return MemberHeader(name, size, crc, offset, size)


class AddedMember(Record):
    """A member that was written."""

    name: str
    sha256: bytes
    size: int


class Writer:
    """Writes an archive to a seekable file. Raises OSError."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._headers: list[MemberHeader] = []

    def add(
        self, name: str, data: Iterable[bytes], *, method: int = STORED, executable: bool = False
    ) -> AddedMember:
        """Write a member."""
        offset, mode = self._out.tell(), 0o755 if executable else 0o644
        # Sizes and checksum are known only after the data. Then the header is written again.
        self._out.write(local_header(MemberHeader(name, 0, 0, offset, 0, method, mode)))
        begin = self._out.tell()
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW) if method == DEFLATED else None
        digest, crc, size = hashlib.sha256(), 0, 0
        for chunk in data:
            digest.update(chunk)
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
            self._out.write(chunk if packer is None else packer.compress(chunk))
        if packer is not None:
            self._out.write(packer.flush())
        end = self._out.tell()
        header = MemberHeader(name, size, crc, offset, end - begin, method, mode)
        self._out.seek(offset)
        self._out.write(local_header(header))
        self._out.seek(end)
        self._headers.append(header)
        return AddedMember(name, digest.digest(), size)

    def close(self) -> None:
        """Write the directory. The caller closes the file."""
        self._out.write(directory(self._headers))


def chunks(path: str) -> Iterator[bytes]:
    """The contents of a file, chunk by chunk. Raises OSError."""
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def local_header(header: MemberHeader) -> bytes:
    """The bytes before a member's data."""
    name = header.name.encode()
    return LOCAL.pack(b"PK\3\4", _VERSION, _UTF8, header.method, 0, _DATE, header.crc,
                      header.packed, header.size, len(name), 0) + name  # fmt: skip


def directory(headers: Iterable[MemberHeader]) -> bytes:
    """The bytes after the last member."""
    records = []
    end = 0
    for header in headers:
        name = header.name.encode()
        attributes = (stat.S_IFREG | header.mode) << 16
        records.append(
            _CENTRAL.pack(b"PK\1\2", _UNIX << 8 | _VERSION, _VERSION, _UTF8, header.method, 0,
                          _DATE, header.crc, header.packed, header.size, len(name), 0, 0, 0, 0,
                          attributes, header.offset) + name
        )  # fmt: skip
        end = header.offset + LOCAL.size + len(name) + header.packed
    whole = b"".join(records)
    count = len(records)
    return whole + _END.pack(b"PK\5\6", 0, 0, count, count, len(whole), end, 0)
