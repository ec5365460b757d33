"""Bundles: a layer of entries in one file, read where it lies.

A bundle is a zip archive that any tool can list and unpack; opkiln reads it by its index:

    opkiln-bundle.json                      name, size and SHA-256 of every member, in order
    v1/ops/…/<deps_key>/{manifest.json,inputs.json,<payload>}
    (the zip directory)

Members are stored as they are, one after the other, with no times and no attributes but one mode.
So every byte of the file follows from the index and from what the members hold: there is no room
for a link, a comment, a second member of the same name or one that the index does not have. The
index carries its own digest.

Taking one entry out reads the index and that entry, checks both, and writes no file: a library is
copied into sealed memory, which nobody can change after it was checked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import stat
from bisect import bisect_left
from struct import Struct
from zlib import crc32

from opkiln.digest import sha256_file
from opkiln.errors import StoreError
from opkiln.record import Record
from opkiln.settings import LAYOUT
from opkiln.store.entry import (
    MANIFEST,
    SCHEMA,
    SIDECAR,
    Leaf,
    Refused,
    parse_manifest,
    write_manifest,
)
from opkiln.store.recheck import Hasher, recheck
from opkiln.trust import fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Any

INDEX = "opkiln-bundle.json"
KIND = "bundle"

# What zip can count without its 64-bit extension, less a little for its directory.
LARGEST = (4 << 30) - (64 << 20)
MOST_MEMBERS = 65_000
_LARGEST_READ = 64 << 20  # of what is read whole: the index, manifests
_CHUNK = 1 << 20

_LOCAL = Struct("<4sHHHHHIIIHH")
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_END = Struct("<4sHHHHIIH")
_VERSION, _UTF8 = 20, 0x800
_UNIX, _DATE = 3, 0x21  # the first of January 1980, where zip's calendar begins
_MODE = (stat.S_IFREG | 0o644) << 16

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
        return int(self.offset) - _LOCAL.size - len(self.name.encode())


class Damaged(ValueError):
    """A bundle is not what its index says; the text says where, and names the digests."""


def index_of(members: Iterable[tuple[str, int, str]]) -> bytes:
    """The index for these members (name, size, SHA-256), which are in the order of their names."""
    listed = [[name, size, sha256] for name, size, sha256 in members]
    return write_manifest({"schema": SCHEMA, "kind": KIND, "members": listed})


def local_header(name: str, size: int, crc: int) -> bytes:
    """What zip has before a member."""
    encoded = name.encode()
    fixed = (b"PK\3\4", _VERSION, _UTF8, 0, 0, _DATE, crc, size, size, len(encoded), 0)
    return _LOCAL.pack(*fixed) + encoded


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
        end = header + _LOCAL.size + len(encoded) + size
    whole = b"".join(records)
    count = len(records)
    return whole + _END.pack(b"PK\5\6", 0, 0, count, count, len(whole), end, 0)


class NoBundle(StoreError):
    """A file that is something else, or was damaged where it begins."""


class Bundle:
    """An open bundle. Raises StoreError for a file that cannot be read or is no bundle at all,
    Damaged for a bad index.

    ``listed``: the user named the file, which is what makes it trusted (see ``opkiln.trust``).
    """

    def __init__(self, path: str, *, listed: bool = False) -> None:
        self.path = path
        try:
            # Not blocked by a FIFO, which would otherwise wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path} is no bundle: it is no regular file")
            if listed and (reason := fault(path, found, listed=True)):
                raise StoreError(reason, hint=f"chmod o-w {path}")
            self.members = _members(path, self._fd, found)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def below(self, prefix: str) -> list[Member]:
        """The members below a directory of the bundle."""
        names = [member.name for member in self.members]
        first = bisect_left(names, prefix + "/")
        last = bisect_left(names, prefix + "0")  # the character after the slash
        return list(self.members[first:last])

    def leaves(self, prefix: str = LAYOUT) -> list[str]:
        """The entries below a directory of the bundle, by path."""
        return list(dict.fromkeys(m.name.rpartition("/")[0] for m in self.below(prefix)))

    def files(self, leaf: str) -> dict[str, Member]:
        """The files of an entry, by name."""
        return {member.name.rpartition("/")[2]: member for member in self.below(leaf)}

    def read(self, member: Member) -> bytes:
        """The checked contents of a small member. Raises Damaged, OSError."""
        if member.size > _LARGEST_READ:
            raise Damaged(f"{member.name} has {member.size} bytes, more than such a file may have")
        data = b"".join(self._chunks(member))
        _compare(member, hashlib.sha256(data).hexdigest())
        return data

    def copy(self, member: Member, fd: int) -> None:
        """Write a member's contents to a file. Raises Damaged, OSError."""
        digest = hashlib.sha256()
        for chunk in self._chunks(member):
            digest.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(fd, view) :]
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
        """Compare every byte of the file with what the index says. Raises Damaged, OSError."""
        index = index_of(member[:3] for member in self.members)
        head = local_header(INDEX, len(index), crc32(index)) + index
        if os.pread(self._fd, len(head), 0) != head:
            raise Damaged(f"its index (SHA-256 {hashlib.sha256(index).hexdigest()}) has changed")
        listed = [(INDEX, len(index), crc32(index), 0)]
        for member in self.members:
            crc, digest = 0, hashlib.sha256()
            for chunk in self._chunks(member):
                crc = crc32(chunk, crc)
                digest.update(chunk)
            _compare(member, digest.hexdigest())
            head = local_header(member.name, member.size, crc)
            if os.pread(self._fd, len(head), member.header) != head:
                raise Damaged(
                    f"the zip header of {member.name} (SHA-256 {member.sha256}) is not as written"
                )
            listed.append((member.name, member.size, crc, member.header))
        tail = directory(listed)
        end = member.offset + member.size
        if os.pread(self._fd, len(tail) + 1, end) != tail:
            raise Damaged("its zip directory is not as written, or something follows it")

    def digest(self) -> str:
        """The SHA-256 of the whole file. Raises OSError."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        return sha256_file(self._fd)


_indexes: dict[tuple[int, ...], tuple[Member, ...]] = {}  # by what ``stat`` says of the file


def _members(path: str, fd: int, found: os.stat_result) -> tuple[Member, ...]:
    """What the index says, read once for each state of a file. Raises as ``Bundle``; OSError."""
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    known = _indexes.get(stamp)
    if known is None:
        known = _indexes[stamp] = _read_index(path, fd, found.st_size)
    return known


def _read_index(path: str, fd: int, file_size: int) -> tuple[Member, ...]:
    """The members, in order, if the index is whole and the file as long as it says."""
    head = os.pread(fd, _LOCAL.size + len(INDEX), 0)
    if len(head) < _LOCAL.size or head[:4] != b"PK\3\4" or head[_LOCAL.size :] != INDEX.encode():
        hint = f"pip install {shlex.quote(path)}" if path.endswith(".whl") else ""
        raise NoBundle(f"{path} is no bundle", why=f"it does not begin with {INDEX}", hint=hint)
    size = _LOCAL.unpack_from(head)[8]
    if size > _LARGEST_READ:
        raise Damaged(f"its index of {size} bytes is larger than any")
    data = os.pread(fd, size, len(head))
    digest = hashlib.sha256(data).hexdigest()
    try:
        body = parse_manifest(data)
        # Only one way of writing it down is taken, so that each of its bytes counts.
        if write_manifest(body) != data or body["kind"] != KIND:
            raise ValueError("not as it was written")
        listed = [(str(name), int(size), str(sha256)) for name, size, sha256 in body["members"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"its index (SHA-256 {digest}): {error}") from error
    members = _laid_out(listed, len(head) + len(data))
    end = members[-1].offset + members[-1].size
    names = [INDEX, *(member.name for member in members)]
    end += _END.size + sum(_CENTRAL.size + len(name.encode()) for name in names)
    if end != file_size:
        raise Damaged(f"it has {file_size} bytes, and {end} by its index (SHA-256 {digest})")
    return members


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
        at += _LOCAL.size + len(name.encode())
        members.append(Member(name, size, sha256, at))
        at += size
        if at > LARGEST:
            raise Damaged(f"its index has {name} beyond the largest size of a bundle")
    return tuple(members)


def _compare(member: Member, found: str) -> None:
    if found != member.sha256:
        raise Damaged(f"{member.name} has the SHA-256 {found}, not {member.sha256}")


def _unreadable(path: str, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be read: {error.strerror or error}", hint=f"ls -l {path}")


# As a layer. An entry goes by the path of its bundle and its own within it: FILE!v1/ops/…


def leaves(path: str, distribution: str, op: str) -> list[str]:
    """An op's entries in a bundle that the user listed. Raises StoreError, Damaged, OSError."""
    with Bundle(path, listed=True) as bundle:
        return [f"{path}!{leaf}" for leaf in bundle.leaves(f"{LAYOUT}/ops/{distribution}/{op}")]


def manifest(leaf: str) -> dict[str, Any]:
    """What an entry says of itself. Raises StoreError, KeyError, ValueError, OSError."""
    path, inner = _split(leaf)
    with Bundle(path, listed=True) as bundle:
        return parse_manifest(bundle.read(bundle.files(inner)[MANIFEST]))


def examine(
    leaf: str, places: Mapping[str, str], hasher: Hasher, *, own: bool = True
) -> Leaf | Refused:
    """Check an entry as ``store.entry.examine`` does; a good one's payload is in sealed memory.

    Never raises for what is wrong with the file.
    """
    try:
        path, inner = _split(leaf)
        with Bundle(path, listed=True) as bundle:
            return _examine(bundle, leaf, inner, places, hasher, own=own)
    except KeyError as error:
        return Refused(leaf, f"damaged: {error} is missing", damaged=True)
    except (ValueError, TypeError) as error:
        return Refused(leaf, f"damaged: {error}", damaged=True)
    except StoreError as error:
        return Refused(leaf, error.what)
    except OSError as error:
        return Refused(leaf, f"unreadable: {error}")


def _examine(
    bundle: Bundle, leaf: str, inner: str, places: Mapping[str, str], hasher: Hasher, *, own: bool
) -> Leaf | Refused:
    files = bundle.files(inner)
    found = parse_manifest(bundle.read(files[MANIFEST]))
    if own:
        now, changed = recheck(
            found["deps"], places, hasher,
            lambda: parse_manifest(bundle.read(files[SIDECAR])), external=False,
        )  # fmt: skip
        if now != inner.rpartition("/")[2]:
            return Refused(leaf, "; ".join(changed) or "its dependencies have changed")
    payload = files[found["payload"]]
    if (payload.size, payload.sha256) != (found["size"], found["sha256"]):
        return Refused(leaf, "damaged: its index and its manifest differ", damaged=True)
    return Leaf(leaf, found, _in_memory(bundle, payload))


def _split(leaf: str) -> tuple[str, str]:
    path, mark, rest = leaf.rpartition(f"!{LAYOUT}/")
    if not mark:
        raise ValueError(f"{leaf} is in no bundle")
    return path, f"{LAYOUT}/{rest}"


_sealed: dict[str, str] = {}  # SHA-256 -> path; the descriptors stay open as long as the process
_last = 2  # the highest descriptor that was used so


def _after_fork() -> None:
    # The paths name the parent, which may end before its child opens them.
    _sealed.clear()


os.register_at_fork(after_in_child=_after_fork)


def _in_memory(bundle: Bundle, member: Member) -> str:
    """A path under which the member can be opened, by this process and by its children."""
    global _last
    known = _sealed.get(member.sha256)
    if known is not None and _still(known, member.sha256):
        return known
    first = os.memfd_create(
        "opkiln-" + member.name.rpartition("/")[2], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    )
    try:
        bundle.copy(member, first)
        # Sealed first, digested then: until then another process of this user could write to it.
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(first, fcntl.F_ADD_SEALS, seals)
        os.lseek(first, 0, os.SEEK_SET)
        _compare(member, sha256_file(first))
        # The dynamic linker knows a library by its path: a number that comes back, after somebody
        # closed every descriptor, would be taken for the library that had it first.
        fd = fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, _last + 1)
    finally:
        os.close(first)
    _last = fd
    path = f"/proc/{os.readlink('/proc/self')}/fd/{fd}"
    _sealed[member.sha256] = path
    return path


def _still(path: str, sha256: str) -> bool:
    try:
        return sha256_file(path) == sha256
    except OSError:
        return False  # somebody closed the descriptor, as daemons close all of theirs
