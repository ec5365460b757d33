"""A bundle's index: what it holds, where each part of the file is, and who has signed that.

Nothing here looks at the entries themselves; ``store.archive`` does.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from zlib import crc32

from opkiln.errors import StoreError
from opkiln.record import Record
from opkiln.settings import LAYOUT
from opkiln.store import signatures
from opkiln.store.entry import SCHEMA, parse_manifest, write_manifest
from opkiln.store.stored_zip import (
    LARGEST,
    LOCAL,
    MOST_MEMBERS,
    directory,
    directory_size,
    local_header,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

INDEX = "opkiln-bundle.json"
KIND = "bundle"

_LARGEST_INDEX = 64 << 20  # bytes

# One part of a path. None begins with a dot, so that none leads upward.
_PART = r"[^/\0\\!.\n][^/\0\\!\n]{0,254}"
_KEY = r"[0-9a-f]{40}"
_MEMBER = re.compile(
    rf"(?P<leaf>{LAYOUT}/ops/{_PART}/{_PART}/{_KEY}/{_KEY}/{_KEY})/(?P<file>{_PART})\Z"
)


class Member(Record):
    """A file in a bundle: what the index says of it, and where its bytes begin."""

    name: str
    size: int
    sha256: str
    offset: int

    @property
    def header(self) -> int:
        """Where its zip header begins."""
        return int(self.offset) - LOCAL.size - len(self.name.encode())


class Damaged(ValueError):
    """A bundle is not what its index says; the text says where, and names the digests."""


def index_of(members: Iterable[tuple[str, int, str]]) -> bytes:
    """The index for these members (name, size, SHA-256), which are in the order of their names."""
    listed = [[name, size, sha256] for name, size, sha256 in members]
    return write_manifest({"schema": SCHEMA, "kind": KIND, "members": listed})


class NoBundle(StoreError):
    """A file that is something else, or was damaged where it begins."""


class Index(Record):
    """What a bundle's index says, and who vouches for that."""

    members: tuple[Member, ...]
    sha256: str  # of the index, which is what is signed
    end: int  # where the last entry ends
    signature: bytes  # empty: not signed


_indexes: dict[tuple[int, ...], Index] = {}  # by what ``stat`` says of the file


def index(path: str, fd: int, found: os.stat_result) -> Index:
    """The index, read once for each state of a file. Raises as ``Bundle``; OSError."""
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    known = _indexes.get(stamp)
    if known is None:
        known = _indexes[stamp] = _read_index(path, fd, found.st_size)
    return known


def _read_index(path: str, fd: int, file_size: int) -> Index:
    """The index, if it is whole and the file as long as it says."""
    head = os.pread(fd, LOCAL.size + len(INDEX), 0)
    if len(head) < LOCAL.size or head[:4] != b"PK\3\4" or head[LOCAL.size :] != INDEX.encode():
        hint = f"pip install {shlex.quote(path)}" if path.endswith(".whl") else ""
        raise NoBundle(f"{path} is no bundle", why=f"it does not begin with {INDEX}", hint=hint)
    size = LOCAL.unpack_from(head)[8]
    if size > _LARGEST_INDEX:
        raise Damaged(f"its index of {size} bytes is larger than any")
    data = os.pread(fd, size, len(head))
    digest = hashlib.sha256(data).hexdigest()
    try:
        body = parse_manifest(data, INDEX)
        # Only one way of writing it down is taken, so that each of its bytes counts.
        if write_manifest(body) != data or body["kind"] != KIND:
            raise ValueError("not as it was written")
        listed = [(str(name), int(size), str(sha256)) for name, size, sha256 in body["members"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Damaged(f"its index (SHA-256 {digest}): {error}") from error
    members = _laid_out(listed, len(head) + len(data))
    end = members[-1].offset + members[-1].size
    signature = _read_signature(fd, end)
    names = [INDEX, *(member.name for member in members)]
    expected = end
    if signature:
        names.append(signatures.MEMBER)
        expected += LOCAL.size + len(signatures.MEMBER) + len(signature)
    expected += directory_size(names)
    if expected != file_size:
        raise Damaged(f"it has {file_size} bytes, and {expected} by its index (SHA-256 {digest})")
    return Index(members, digest, end, signature)


def _read_signature(fd: int, at: int) -> bytes:
    """The member with the signatures; empty where zip's directory comes at once."""
    head = os.pread(fd, LOCAL.size + len(signatures.MEMBER), at)
    if head[:4] != b"PK\3\4" or len(head) < LOCAL.size:
        return b""
    size = LOCAL.unpack_from(head)[8]
    if head[LOCAL.size :] != signatures.MEMBER.encode() or size > signatures.LARGEST:
        raise Damaged(f"its last entry is followed by what is not {signatures.MEMBER}")
    data = os.pread(fd, size, at + len(head))
    try:
        signatures.read(data)
    except ValueError as error:
        digest = hashlib.sha256(data).hexdigest()
        raise Damaged(f"{signatures.MEMBER} (SHA-256 {digest}): {error}") from error
    return data


def _laid_out(listed: list[tuple[str, int, str]], at: int) -> tuple[Member, ...]:
    """Where each member lies. Raises Damaged for what no bundle holds."""
    if not 0 < len(listed) <= MOST_MEMBERS:
        raise Damaged(f"its index has {len(listed)} members")
    members: list[Member] = []
    for name, size, sha256 in listed:
        if not _MEMBER.match(name) or not name.isprintable():
            raise Damaged(f"its index has a member {name[:200]!r}, which is the path of no entry")
        if members and name <= members[-1].name:
            raise Damaged(f"its index has {name} twice, or out of order")
        if size < 0 or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise Damaged(f"its index has no size or no digest of {name}")
        at += LOCAL.size + len(name.encode())
        members.append(Member(name, size, sha256, at))
        at += size
        if at > LARGEST:
            raise Damaged(f"its index has {name} beyond the largest size of a bundle")
    return tuple(members)


def signed_tail(members: list[tuple[str, int, int, int]], end: int, signature: bytes) -> bytes:
    """All that follows the entries, which end at ``end``: their signatures, if any, and what zip
    has after the last member."""
    if not signature:
        return directory(members)
    crc = crc32(signature)
    member = (signatures.MEMBER, len(signature), crc, end)
    head = local_header(signatures.MEMBER, len(signature), crc)
    return head + signature + directory([*members, member])
