"""Bundles: a layer of entries in one file, read in place.

A bundle is a ZIP archive that any tool can list and unpack. opkiln reads it by its index:

    opkiln-bundle.json                      name, size and SHA-256 of every member, in order
    v1/ops/…/<deps_key>/{manifest.json,inputs.json,<payload>}
    v1/objects/…/<deps_key>/{manifest.json,inputs.json,0,1,…}
    opkiln-bundle.sig.json                  only if signed: signatures over the index
    (the ZIP directory)

Members are stored without compression (``store.zip_format``). So the index and the members'
contents determine every byte of the file. It cannot contain a link, a comment, a second member of
the same name, or a member that the index does not list. The index and the signatures
(``store.signatures``) contain their own digests.

To use one entry, opkiln reads and checks the index and that entry. It writes no file: it copies the
library into sealed memory (``store.sealed``), so nobody can change it after the check.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO
from zlib import crc32

from opkiln.base.digest import LARGEST_BUNDLE, sha256_file
from opkiln.base.lazy import Record
from opkiln.base.model import place_of
from opkiln.base.trust import fault
from opkiln.errors import StoreError
from opkiln.machine.facts import Hasher
from opkiln.settings import LAYOUT
from opkiln.store import entry, sealed, signatures, zip_format
from opkiln.store.key import deps_key, find_changes
from opkiln.store.zip_format import LOCAL, MemberHeader

INDEX = "opkiln-bundle.json"
KIND = "bundle"

_LARGEST_INDEX = 64 << 20  # bytes
_LARGEST_READ = 64 << 20  # bytes of a member that is read into memory, such as a manifest
_CHUNK = 1 << 20

# One part of a path. It cannot begin with a dot, so no path leads upward.
_PART = r"[^/\0\\!.\n][^/\0\\!\n]{0,254}"
_KEY = r"[0-9a-f]{40}"
_PLACE = rf"(?:ops/{_PART}/{_PART}/{_KEY}|objects/[0-9a-f]{{2}})/{_KEY}/{_KEY}"
_MEMBER = re.compile(rf"{LAYOUT}/{_PLACE}/{_PART}\Z")


class Member(Record):
    """A file in a bundle: its entry in the index, and where its data begins."""

    name: str
    size: int
    sha256: str
    offset: int

    @property
    def header(self) -> int:
        """Where its ZIP header begins."""
        return int(self.offset) - LOCAL.size - len(self.name.encode())


class Damaged(ValueError):
    """A bundle does not match its index. The message says where, with the digests."""


def write_index(members: Iterable[tuple[str, int, str]]) -> bytes:
    """The index of these members (name, size, SHA-256), which must be sorted by name."""
    listed = [[name, size, sha256] for name, size, sha256 in members]
    return entry.write_manifest({"schema": entry.SCHEMA, "kind": KIND, "members": listed})


class NotABundle(StoreError):
    """A file that is not a bundle, or whose beginning is damaged.

    Copy it again, and compare its digest with that of the original. Install a wheel with pip.
    """


class Index(Record):
    """A bundle's index, and the signatures over it."""

    members: tuple[Member, ...]
    entries: dict[str, dict[str, Member]]  # by path; their files by name
    sha256: str  # of the index; the signatures sign it
    end: int  # where the last entry ends
    signature: bytes  # empty if the bundle is not signed


_indexes: dict[tuple[int, ...], Index] = {}  # by the file's ``stat``


def index(path: str, fd: int, found: os.stat_result) -> Index:
    """The index. Read again only if the file changes. Raises StoreError, Damaged, OSError."""
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    known = _indexes.get(stamp)
    if known is None:
        known = _indexes[stamp] = _read_index(path, fd, found.st_size)
    return known


def _read_index(path: str, fd: int, file_size: int) -> Index:
    """The index, if it is intact and the file has the size that the index implies."""
    head = os.pread(fd, LOCAL.size + len(INDEX), 0)
    if len(head) < LOCAL.size or head[:4] != b"PK\3\4" or head[LOCAL.size :] != INDEX.encode():
        hint = f"pip install {shlex.quote(path)}" if path.endswith(".whl") else ""
        raise NotABundle(
            f"{path} is not a bundle", why=f"it does not begin with {INDEX}", hint=hint
        )
    size = LOCAL.unpack_from(head)[8]
    if size > _LARGEST_INDEX:
        raise Damaged(f"its index has {size} bytes, more than the limit of {_LARGEST_INDEX}")
    data = os.pread(fd, size, len(head))
    digest = hashlib.sha256(data).hexdigest()
    try:
        body = entry.parse_manifest(data, INDEX)
        # Accept only the form that opkiln writes, so that no byte can vary.
        if entry.write_manifest(body) != data or body["kind"] != KIND:
            raise ValueError("it is not in the form that opkiln writes")
        listed = [(str(name), int(size), str(sha256)) for name, size, sha256 in body["members"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise Damaged(f"its index (SHA-256 {digest}): {error}") from error
    members = _lay_out(listed, len(head) + len(data))
    end = members[-1].offset + members[-1].size
    signature = _read_signature(fd, end)
    names = [INDEX, *(member.name for member in members)]
    expected = end + len(
        signed_tail([zip_format.stored_header(name, 0, 0, 0) for name in names], end, signature)
    )
    if expected != file_size:
        raise Damaged(f"it has {file_size} bytes; its index (SHA-256 {digest}) says {expected}")
    entries: dict[str, dict[str, Member]] = {}
    for member in members:
        leaf, _, file = member.name.rpartition("/")
        entries.setdefault(leaf, {})[file] = member
    return Index(members, entries, digest, end, signature)


def _read_signature(fd: int, at: int) -> bytes:
    """The member with the signatures; empty if the ZIP directory comes next."""
    head = os.pread(fd, LOCAL.size + len(signatures.MEMBER), at)
    if head[:4] != b"PK\3\4" or len(head) < LOCAL.size:
        return b""
    size = LOCAL.unpack_from(head)[8]
    if head[LOCAL.size :] != signatures.MEMBER.encode() or size > signatures.LARGEST:
        raise Damaged(f"its last entry is followed by something other than {signatures.MEMBER}")
    data = os.pread(fd, size, at + len(head))
    try:
        signatures.read(data)
    except ValueError as error:
        digest = hashlib.sha256(data).hexdigest()
        raise Damaged(f"{signatures.MEMBER} (SHA-256 {digest}): {error}") from error
    return data


def _lay_out(listed: list[tuple[str, int, str]], at: int) -> tuple[Member, ...]:
    """The members with their offsets in the file. Raises Damaged for an invalid list."""
    if not 0 < len(listed) <= zip_format.MOST_MEMBERS:
        raise Damaged(f"its index has {len(listed)} members")
    members: list[Member] = []
    for name, size, sha256 in listed:
        if not _MEMBER.match(name) or not name.isprintable():
            raise Damaged(
                f"its index has a member {name[:200]!r}, which is not the path of an entry"
            )
        if members and name <= members[-1].name:
            raise Damaged(f"its index has {name} twice, or out of order")
        if size < 0 or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise Damaged(f"its index lacks the size or the digest of {name}")
        at += LOCAL.size + len(name.encode())
        members.append(Member(name, size, sha256, at))
        at += size
        if at > zip_format.LARGEST:
            raise Damaged(f"its index puts {name} beyond the maximum size of a bundle")
    return tuple(members)


def signed_tail(headers: list[MemberHeader], end: int, signature: bytes) -> bytes:
    """The bytes after the entries, which end at ``end``: the signatures, if any, and the ZIP
    directory."""
    if not signature:
        return zip_format.directory(headers)
    last = zip_format.stored_header(signatures.MEMBER, len(signature), crc32(signature), end)
    return zip_format.local_header(last) + signature + zip_format.directory([*headers, last])


# Reading entries


class Bundle:
    """An open bundle. ``listed`` means that the user listed it as a layer. That makes it trusted
    (``base.trust``), unless ``OPKILN_TRUSTED_KEYS`` also asks for a signature. Raises StoreError
    for a file that cannot be read or is not a bundle, Damaged for a bad index."""

    def __init__(self, path: str, *, listed: bool = False) -> None:
        self.path = path
        self.headers: list[MemberHeader] = []  # of the index and all entries, after ``check``
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be read: {error.strerror or error}",
                hint=f"ls -l {shlex.quote(path)}",
            ) from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path} is not a bundle: it is not a regular file")
            if listed and (reason := fault(path, found, listed=True)):
                raise StoreError(reason, hint=f"chmod o-w {shlex.quote(path)}")
            self.index = index(path, self._fd, found)
            if listed:
                self.authenticate()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def authenticate(self) -> str:
        """The key that makes it trusted; empty if no key is required. Raises Untrusted."""
        signed = signatures.message(self.index.sha256)
        return signatures.require(self.path, signed, self.index.signature)

    def read(self, member: Member) -> bytes:
        """The checked contents of a small member. Raises Damaged, OSError."""
        if member.size > _LARGEST_READ:
            raise Damaged(
                f"{member.name} has {member.size} bytes, more than the limit of {_LARGEST_READ}"
            )
        data = b"".join(self._chunks(member))
        _compare(member, hashlib.sha256(data).hexdigest())
        return data

    def copy(self, member: Member, out: BinaryIO) -> None:
        """Write a member's checked contents to a file. Raises Damaged, OSError."""
        digest = hashlib.sha256()
        for chunk in self._chunks(member):
            digest.update(chunk)
            out.write(chunk)
        _compare(member, digest.hexdigest())

    def _chunks(self, member: Member) -> Iterator[bytes]:
        at, left = member.offset, member.size
        while left:
            chunk = os.pread(self._fd, min(left, _CHUNK), at)
            if not chunk:
                raise Damaged(f"the file ends within {member.name} (SHA-256 {member.sha256})")
            yield chunk
            at, left = at + len(chunk), left - len(chunk)

    def check(self) -> None:
        """Compare every byte of the file with the index. Raises Damaged, OSError."""
        listing = write_index(member[:3] for member in self.index.members)
        headers = [zip_format.stored_header(INDEX, len(listing), crc32(listing), 0)]
        head = zip_format.local_header(headers[0]) + listing
        if os.pread(self._fd, len(head), 0) != head:
            raise Damaged(f"its index (SHA-256 {self.index.sha256}) has changed")
        for member in self.index.members:
            crc, digest = 0, hashlib.sha256()
            for chunk in self._chunks(member):
                crc = crc32(chunk, crc)
                digest.update(chunk)
            _compare(member, digest.hexdigest())
            headers.append(zip_format.stored_header(member.name, member.size, crc, member.header))
            head = zip_format.local_header(headers[-1])
            if os.pread(self._fd, len(head), member.header) != head:
                raise Damaged(
                    f"the zip header of {member.name} (SHA-256 {member.sha256}) has changed"
                )
        end = self.index.end
        tail = signed_tail(headers, end, self.index.signature)
        if os.pread(self._fd, len(tail) + 1, end) != tail:
            raise Damaged("its zip directory has changed, or something follows it")
        self.headers = headers

    def digest(self) -> str:
        """The SHA-256 of the whole file. Raises OSError."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        return sha256_file(self._fd, LARGEST_BUNDLE)


def _compare(member: Member, found: str) -> None:
    if found != member.sha256:
        raise Damaged(f"{member.name} has the SHA-256 {found}, not {member.sha256}")


# A bundle as a layer. An entry's path is the bundle's path and its path inside: FILE!v1/ops/…


def leaves(path: str, distribution: str, op: str) -> list[str]:
    """An op's entries in a bundle that the user listed. Raises StoreError, Damaged, OSError."""
    place = f"{LAYOUT}/ops/{place_of(distribution, op)}"
    with Bundle(path, listed=True) as bundle:
        return [f"{path}!{leaf}" for leaf in bundle.index.entries if leaf.startswith(f"{place}/")]


def manifest(leaf: str) -> dict[str, Any]:
    """An entry's manifest. Raises StoreError, KeyError, ValueError, OSError."""
    path, inner = _split(leaf)
    with Bundle(path, listed=True) as bundle:
        return entry.parse_manifest(
            bundle.read(bundle.index.entries.get(inner, {})[entry.MANIFEST])
        )


def examine(
    leaf: str, places: Mapping[str, str], hasher: Hasher, *, own: bool = True
) -> entry.Leaf | entry.Refused:
    """Check an entry as ``store.entry.examine`` does, and copy a good payload to sealed memory. A
    damaged file gives a Refused, never an exception."""
    try:
        path, inner = _split(leaf)
        with Bundle(path, listed=True) as bundle:
            files = bundle.index.entries.get(inner, {})
            found = entry.parse_manifest(bundle.read(files[entry.MANIFEST]))
            if own:
                if deps_key(found["deps"]) != inner.rpartition("/")[2]:
                    raise ValueError("its name does not match its dependencies")
                if changed := find_changes(found["deps"], None, places, hasher):
                    return entry.Refused(leaf, "; ".join(changed))
            payload = files[found["payload"]]
            if (payload.size, payload.sha256) != (found["size"], found["sha256"]):
                raise ValueError("its index and its manifest disagree")
            return entry.Leaf(leaf, found, _open_in_memory(bundle, payload))
    except entry.MALFORMED as error:
        return entry.Refused(leaf, f"damaged: {entry.describe_error(error)}", damaged=True)
    except StoreError as error:
        return entry.Refused(leaf, error.what)
    except OSError as error:
        return entry.Refused(leaf, f"unreadable: {error}")


def _split(leaf: str) -> tuple[str, str]:
    path, mark, rest = leaf.rpartition(f"!{LAYOUT}/")
    if not mark:
        raise ValueError(f"{leaf} is not in a bundle")
    return path, f"{LAYOUT}/{rest}"


def _open_in_memory(bundle: Bundle, member: Member) -> str:
    """A path by which this process and its children can open the member."""
    name = member.name.rpartition("/")[2]
    try:
        return sealed.keep(name, member.sha256, lambda out: bundle.copy(member, out))
    except sealed.Changed as error:
        raise Damaged(f"{member.name} has the SHA-256 {error}, not {member.sha256}") from error
