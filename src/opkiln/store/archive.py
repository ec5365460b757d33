"""Bundles: a layer of entries in one file, read where it lies.

A bundle is a zip archive that any tool can list and unpack; opkiln reads it by its index:

    opkiln-bundle.json                      name, size and SHA-256 of every member, in order
    v1/ops/…/<deps_key>/{manifest.json,inputs.json,<payload>}
    opkiln-bundle.sig.json                  of a signed one: signatures over the index
    (the zip directory)

Members are stored as they are, one after the other, with no times and no attributes but one mode.
So every byte of the file follows from the index and from what the members hold: there is no room
for a link, a comment, a second member of the same name or one that the index does not have. The
index and the signatures (``store.signatures``) carry their own digests.

Taking one entry out reads the index and that entry, checks both, and writes no file: a library is
copied into sealed memory (``store.sealed``), which nobody can change after it was checked.
"""

from __future__ import annotations

import hashlib
import os
import stat
from bisect import bisect_left
from zlib import crc32

from opkiln.digest import sha256_file
from opkiln.errors import StoreError
from opkiln.settings import LAYOUT
from opkiln.store import sealed, signatures
from opkiln.store.bundle_index import (
    INDEX,
    Damaged,
    Member,
    index,
    index_of,
    signed_tail,
)
from opkiln.store.entry import MANIFEST, SIDECAR, Leaf, Refused, in_words, parse_manifest
from opkiln.store.recheck import Hasher, recheck
from opkiln.store.stored_zip import local_header
from opkiln.trust import fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType
    from typing import Any

_LARGEST_READ = 64 << 20  # bytes of what is read whole: manifests
_CHUNK = 1 << 20


class Bundle:
    """An open bundle. Raises StoreError for a file that cannot be read or is no bundle at all,
    Damaged for a bad index.

    ``listed``: it is a layer. That the user named the file is what makes it trusted (see
    ``opkiln.trust``), and a signature where ``OPKILN_TRUSTED_KEYS`` asks for one.
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
            self.index = index(path, self._fd, found)
            self.members = self.index.members
            if listed:
                self.authenticate()
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

    def authenticate(self) -> str:
        """The key that makes it trusted; empty where none is asked for. Raises Untrusted."""
        return signatures.require(self.path, self.index.sha256, self.index.signature)

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

    def check(self) -> list[tuple[str, int, int, int]]:
        """Compare every byte of the file with what the index says. Raises Damaged, OSError.

        Returns what ``directory`` takes, of all but the signatures.
        """
        listing = index_of(member[:3] for member in self.members)
        head = local_header(INDEX, len(listing), crc32(listing)) + listing
        if os.pread(self._fd, len(head), 0) != head:
            raise Damaged(f"its index (SHA-256 {self.index.sha256}) has changed")
        listed = [(INDEX, len(listing), crc32(listing), 0)]
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
        end = self.index.end
        tail = signed_tail(listed, end, self.index.signature)
        if os.pread(self._fd, len(tail) + 1, end) != tail:
            raise Damaged("its zip directory is not as written, or something follows it")
        return listed

    def digest(self) -> str:
        """The SHA-256 of the whole file. Raises OSError."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        return sha256_file(self._fd)


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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Refused(leaf, f"damaged: {in_words(error)}", damaged=True)
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
            lambda: parse_manifest(bundle.read(files[SIDECAR]), SIDECAR), external=False,
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


def _in_memory(bundle: Bundle, member: Member) -> str:
    """A path under which the member can be opened, by this process and by its children."""

    def fill(fd: int) -> None:
        bundle.copy(member, fd)

    try:
        return sealed.keep(member.name.rpartition("/")[2], member.sha256, fill)
    except sealed.Changed as error:
        raise Damaged(f"{member.name} has the SHA-256 {error}, not {member.sha256}") from error
