"""The zip form of a bundle: members stored as they are, without times, extras or comments.

Every byte here follows from names, sizes and checksums. ``store.archive`` compares, ``ship.bundle``
writes.
"""

from __future__ import annotations

import stat
from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# What zip can count without its 64-bit extension, less a little for its directory.
LARGEST = (4 << 30) - (64 << 20)
MOST_MEMBERS = 65_000

LOCAL = Struct("<4sHHHHHIIIHH")
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_END = Struct("<4sHHHHIIH")
_VERSION, _UTF8 = 20, 0x800
_UNIX, _DATE = 3, 0x21  # the first of January 1980, where zip's calendar begins
_MODE = (stat.S_IFREG | 0o644) << 16


def local_header(name: str, size: int, crc: int) -> bytes:
    """What zip has before a member."""
    encoded = name.encode()
    fixed = (b"PK\3\4", _VERSION, _UTF8, 0, 0, _DATE, crc, size, size, len(encoded), 0)
    return LOCAL.pack(*fixed) + encoded


def directory(members: Iterable[tuple[str, int, int, int]]) -> bytes:
    """What zip has after the last member; for each (name, size, crc, where its header begins)."""
    records = []
    end = 0
    for name, size, crc, header in members:
        encoded = name.encode()
        records.append(
            _CENTRAL.pack(b"PK\1\2", _UNIX << 8 | _VERSION, _VERSION, _UTF8, 0, 0, _DATE, crc,
                          size, size, len(encoded), 0, 0, 0, 0, _MODE, header) + encoded
        )  # fmt: skip
        end = header + LOCAL.size + len(encoded) + size
    whole = b"".join(records)
    count = len(records)
    return whole + _END.pack(b"PK\5\6", 0, 0, count, count, len(whole), end, 0)


def directory_size(names: Iterable[str]) -> int:
    """How many bytes ``directory`` gives for members of these names."""
    return _END.size + sum(_CENTRAL.size + len(name.encode()) for name in names)
