"""The zip archive that a wheel is, in the one form in which opkiln writes it.

Members lie one after the other, deflated, with no time, no comment and no extra field, then the
directory, then the end: so the same files give the same bytes, and every byte around the members'
own follows from their names, modes, sizes and checksums. ``check`` holds a file against that.
(``deflate`` may be done in more ways than one; the same zlib does it in one.)
"""

from __future__ import annotations

import hashlib
import stat
import zlib
from struct import Struct
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

_LOCAL = Struct("<4sHHHHHIIIHH")
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_END = Struct("<4sHHHHIIH")
_VERSION, _UTF8, _DEFLATED = 20, 0x800, 8
_UNIX, _DATE = 3, 0x21  # the first of January 1980, where zip's calendar begins
_LEVEL, _RAW = 9, -15
_CHUNK = 1 << 20

# What zip can count without its 64-bit extension, which not every reader of wheels has.
LARGEST = (4 << 30) - (64 << 20)
MOST_MEMBERS = 65_000


class Member(NamedTuple):
    """A file in the archive, as the directory lists it."""

    name: str
    mode: int
    crc: int
    packed: int  # its size in the archive
    size: int
    offset: int  # of its header


class Added(NamedTuple):
    """What was put into an archive, as a wheel's RECORD lists it."""

    name: str
    sha256: bytes
    size: int


class Writer:
    """Writes an archive to a file that can be sought in. Raises OSError."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._members: list[Member] = []

    def add(self, name: str, data: Iterable[bytes], *, executable: bool = False) -> Added:
        """Put a file in."""
        offset = self._out.tell()
        # What is known only afterwards is 0 for now.
        self._out.write(_local(Member(name, mode(executable=executable), 0, 0, 0, offset)))
        begin = self._out.tell()
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW)
        digest, crc, size = hashlib.sha256(), 0, 0
        for chunk in data:
            digest.update(chunk)
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
            self._out.write(deflate.compress(chunk))
        self._out.write(deflate.flush())
        end = self._out.tell()
        member = Member(name, mode(executable=executable), crc, end - begin, size, offset)
        self._out.seek(offset)
        self._out.write(_local(member))
        self._out.seek(end)
        self._members.append(member)
        return Added(name, digest.digest(), size)

    def close(self) -> None:
        """Write the directory; the file is the caller's to close."""
        self._out.write(_directory(self._members, self._out.tell()))


def mode(*, executable: bool) -> int:
    """The mode of a file that may be run, or of one that may not."""
    return 0o755 if executable else 0o644


def chunks(path: str) -> Iterator[bytes]:
    """A file, piece by piece. Raises OSError."""
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def check(file: BinaryIO, members: list[Member]) -> str:
    """Why an open archive is not as ``Writer`` writes these members; "" when it is.

    The members' contents are not looked at, but for what no reader of zip files sees: bytes, and
    bits, after the end of what was deflated. Raises zlib.error, OSError.
    """
    at = 0
    for member in members:
        if member.offset != at:
            return f"{member.name} begins at {member.offset}, not at {at}"
        file.seek(at)
        header = _local(member)
        if file.read(len(header)) != header:
            return f"the header of {member.name} is not as it was written"
        if not _ends_there(file, member.packed, member.size):
            return f"{member.name} has something behind its end"
        at += len(header) + member.packed
    file.seek(at)
    rest = _directory(members, at)
    if file.read(len(rest) + 1) != rest:
        return "its directory is not as it was written"
    return ""


def _ends_there(file: BinaryIO, packed: int, size: int) -> bool:
    """Whether the deflated data that come next in a file take up all of their bytes, and the bits
    that are left of the last are zeros, as every writer leaves them. Raises zlib.error, OSError."""
    inflate = zlib.decompressobj(_RAW)
    length, left = 0, packed - 1
    while left > 0 and (piece := file.read(min(left, _CHUNK))):
        left -= len(piece)
        while piece and not inflate.eof and length <= size:
            length += len(inflate.decompress(piece, _CHUNK))
            piece = inflate.unconsumed_tail
    last = file.read(1)
    if left or not last or inflate.eof or length > size:
        return False

    def ending(byte: int) -> tuple[bytes, bool]:
        rest = inflate.copy()
        return rest.decompress(bytes([byte]), _CHUNK), rest.eof

    end = ending(last[0])
    if length + len(end[0]) != size or not end[1]:
        return False
    # A bit of the last byte that can be cleared, and the data are the same, is not part of them.
    bits = (1 << bit for bit in range(8) if last[0] & 1 << bit)
    return all(_differs(ending, last[0] & ~bit, end) for bit in bits)


def _differs(
    ending: Callable[[int], tuple[bytes, bool]], last: int, end: tuple[bytes, bool]
) -> bool:
    try:
        return ending(last) != end
    except zlib.error:
        return True


def _local(member: Member) -> bytes:
    name = member.name.encode()
    return _LOCAL.pack(b"PK\3\4", _VERSION, _UTF8, _DEFLATED, 0, _DATE, member.crc, member.packed,
                       member.size, len(name), 0) + name  # fmt: skip


def _directory(members: list[Member], at: int) -> bytes:
    records = []
    for member in members:
        name = member.name.encode()
        attributes = (stat.S_IFREG | member.mode) << 16
        records.append(
            _CENTRAL.pack(b"PK\1\2", _UNIX << 8 | _VERSION, _VERSION, _UTF8, _DEFLATED, 0, _DATE,
                          member.crc, member.packed, member.size, len(name), 0, 0, 0, 0,
                          attributes, member.offset) + name
        )  # fmt: skip
    whole = b"".join(records)
    count = len(records)
    return whole + _END.pack(b"PK\5\6", 0, 0, count, count, len(whole), at, 0)
