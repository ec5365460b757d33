"""One leaf of the store: a finished file, its manifest, its sidecar and its log.

    <leaf>/manifest.json   what a hit reads: digests, target, dependencies, and its own digest
           inputs.json     the sidecar: the long lists behind the keys (for `explain`)
           build.log       the compilers' output
           <payload>       the library, module, program or object, as the compiler wrote it

A leaf is named by its deps_key. It never changes, and it is used only if it passes every check.

A matching digest shows that a file is intact, not that opkiln wrote it. So types are checked once,
when a manifest is read, and other code can rely on them. A missing part is reported by the code
that needs it. Unknown parts are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager
from typing import Any

from opkiln import settings
from opkiln.base.digest import (
    LARGEST,
    LARGEST_RECORD,
    UnusableFile,
    open_regular,
    read_file,
    read_opened,
    sha256_file,
)
from opkiln.base.lazy import Record
from opkiln.base.trust import fault
from opkiln.store import key

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from opkiln.machine.facts import Hasher


# A shape is a type, a list of one shape, a dict of parts (all optional), a Row, or Named.
_NUMBER = (int, float)


class Row:
    """A list that begins with fixed parts. With ``rest``, any number of items of that shape
    follow."""

    def __init__(self, *parts: Any, rest: Any = None) -> None:
        self.parts = parts
        self.rest = rest
        self.flat = {type}.issuperset(map(type, parts))  # no lists or objects in it


class Named:
    """A dict with any keys, and one shape for all of its values."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


_TEXTS = [str]
_MANIFEST = {
    "kind": str,
    "op": str,
    "distribution": str,
    "spec": str,
    "payload": str,
    "size": int,
    "sha256": str,
    "source": str,
    "wall": _NUMBER,
    "seconds": _NUMBER,
    "created": _NUMBER,
    "max_rss": int,
    "toolchain": Named(str),
    "target": {
        "backend": str,
        "system": str,
        "machine": str,
        "cpu": str,
        "cpu_features": _TEXTS,
        "abi_tag": str,
        "debug": bool,
        "flags": [Row(str, _TEXTS)],
        "archs": _TEXTS,
    },
    "needs": {
        "cpu": _TEXTS,
        "sonames": _TEXTS,
        "symbols": [Row(str, str, str)],
        "images": _TEXTS,
    },
    "deps": {
        "own": [Row(str, str, str)],
        "others": str,
    },
    "fetched": Named(str),
    # Of an observed command: each file's anchor, path, name here, size, digest and kind.
    "files": [Row(str, str, str, int, str, str)],
    "host": str,
    "group": str,
    "places": Named(str),
    "step": str,  # the command's key, in an object that travels
    "messages": str,
    "rebuilt": str,
    # Parts of a sidecar, of a bundle's index and of its signatures.
    "facts": [Row(str, str, str, str, rest=int)],  # kind, anchor, path, value, signature
    "inputs": {
        "spec": {"sources": _TEXTS},
        "target": Named(object),
        "toolchain": Named({"version": str, "identity": str}),
        "torch": Named(str),
        "steps": [_TEXTS],
    },
    "members": [Row(str, int, str)],
    "signatures": [Row(str, str)],
}
_WORDS = {
    str: "a string",
    int: "a number",
    bool: "true or false",
    _NUMBER: "a number",
}


def find_wrong_type(body: dict[str, Any]) -> str:
    """A message about the first part that has the wrong type; empty if there is none."""
    return _find_wrong(body, _MANIFEST, "")


# Comparing types is enough, because JSON has no subclasses.


def _find_wrong(value: Any, shape: Any, where: str) -> str:
    if isinstance(shape, (type, tuple)):
        fits = shape is object or type(value) in (shape if isinstance(shape, tuple) else (shape,))
        return "" if fits else _mismatch(value, where, _WORDS[shape])
    if isinstance(shape, (dict, Named)):
        if type(value) is not dict:
            return _mismatch(value, where, "an object")
        shapes = dict.fromkeys(value, shape.shape) if isinstance(shape, Named) else shape
        parts = [
            (each, shapes[name], f"{where}.{name}" if where else name)
            for name, each in value.items()
            if name in shapes
        ]
    else:
        if type(value) is not list:
            return _mismatch(value, where, "a list")
        row = shape if isinstance(shape, Row) else Row(rest=shape[0])
        count, more = len(row.parts), row.rest is not None
        if len(value) < count or (len(value) > count and not more):
            return f"{where} has {len(value)} parts, not {count}{' and more' if more else ''}"
        parts = [
            (value[place], row.parts[place] if place < count else row.rest, f"{where}[{place}]")
            for place in _pick_each_type(value, row)
        ]
    return next(filter(None, (_find_wrong(*part) for part in parts)), "")


def _pick_each_type(value: list[Any], row: Row) -> Sequence[int]:
    """The places in a list to check. A sidecar has thousands of rows, so of rows whose parts have
    equal types only one is checked."""
    if row.parts or not (row.rest is str or (isinstance(row.rest, Row) and row.rest.flat)):
        return range(len(value))
    types = [tuple(map(type, each)) if type(each) is list else type(each) for each in value]
    return sorted(map(types.index, set(types)))


def _mismatch(value: Any, where: str, expected: str) -> str:
    shown = repr(value)
    return f"{where} is {shown if len(shown) <= 40 else shown[:39] + '…'}, not {expected}"


SCHEMA = settings.SCHEMA
MANIFEST = "manifest.json"
SIDECAR = "inputs.json"
LOG = "build.log"
FETCHED = "fetched"  # the part of a manifest that says which remote tier the entry came from

_HEAD = '{"sha256":"'
_MIDDLE = '","manifest":'
_TAIL = "}\n"
_BODY_AT = len(_HEAD) + 64 + len(_MIDDLE)


class Leaf(Record):
    """A leaf that passed every check."""

    directory: str
    manifest: dict[str, Any]
    file: str = ""  # the payload's path, if the leaf is not a directory (``store.archive``)

    @property
    def payload(self) -> str:
        return self.file or os.path.join(self.directory, self.manifest["payload"])


class Refused(Record):
    """A leaf that failed a check, and why. ``damaged`` means that it can never be good again."""

    directory: str
    reason: str
    damaged: bool = False


def write_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest file: valid JSON that contains the digest of its own body."""
    body = json.dumps(manifest, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f"{_HEAD}{digest}{_MIDDLE}{body}{_TAIL}".encode()


def parse_manifest(data: bytes, name: str = MANIFEST) -> dict[str, Any]:
    """The body of a manifest, or of another file of the same form. Raises ValueError if the digest
    does not match, or if a part has the wrong type. The message about a type includes ``name``."""
    body = data[_BODY_AT : -len(_TAIL)]
    digest = hashlib.sha256(body).hexdigest()
    if data != f"{_HEAD}{digest}{_MIDDLE}".encode() + body + _TAIL.encode():
        raise ValueError("the manifest's digest does not match")
    try:
        manifest = json.loads(body)
    except RecursionError:
        raise ValueError("the manifest is nested too deeply") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        told = f" {found}" if type(found) is int else ""
        raise ValueError(
            f"the manifest has an unknown schema{told}; this opkiln reads schema {SCHEMA}"
        )
    if digest not in _checked:
        if problem := find_wrong_type(manifest):
            raise ValueError(f"{name}: {problem}")
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        _checked.add(digest)
    return manifest


# Digests of manifests whose types were checked: each manifest is read more than once.
_checked: set[str] = set()
_MOST_CHECKED = 1000  # limits the memory that a check of a large store needs


# Exceptions for a manifest that is not as it should be.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def describe_error(error: Exception) -> str:
    """The message for an exception that was raised while a manifest was read."""
    if isinstance(error, KeyError):
        return f"{MANIFEST}: {error} is missing"
    if isinstance(error, (TypeError, AttributeError, RecursionError)):
        return f"{MANIFEST}: it is malformed ({type(error).__name__}: {error})"
    return str(error)


def list_newest(directory: str) -> list[str]:
    """The names in a directory, the newest first, without hidden ones; none if it is missing or
    cannot be read."""
    try:
        names = sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except OSError:
        return []
    if len(names) > 1:
        names.sort(key=lambda name: _modification_time(os.path.join(directory, name)), reverse=True)
    return names


def _modification_time(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def read_sidecar(directory: str) -> dict[str, Any]:
    """The long lists of a leaf. Raises OSError, and ValueError if their digest does not match."""
    return parse_manifest(read_file(os.path.join(directory, SIDECAR)), SIDECAR)


def read_manifest(directory: str) -> dict[str, Any]:
    """The manifest of a leaf, without any check of the leaf. Raises as ``read_sidecar``."""
    return parse_manifest(read_file(os.path.join(directory, MANIFEST)))


def list_files(manifest: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """(size, digest) of a leaf's own files, by name: the payload, and what else a command wrote.
    Raises KeyError."""
    files = {name: (size, sha256) for _, _, name, size, sha256, _ in manifest.get("files", [])}
    return {**files, manifest["payload"]: (manifest["size"], manifest["sha256"])}


def examine(
    directory: str,
    places: Mapping[str, str],
    hasher: Hasher,
    *,
    listed: bool,
    whole: bool,
    own: bool = True,
) -> Leaf | Refused | None:
    """Check a leaf: trust, manifest, dependencies, digest. None if it does not exist (any more).
    With ``whole``, all facts are checked, not only the author's files. With ``own=False``, none
    are: `cache verify` does not have the sources."""
    try:
        if reason := fault(directory, os.lstat(directory), listed=listed):
            return Refused(directory, reason)
        path = os.path.join(directory, MANIFEST)
        with _open_checked(path, listed, LARGEST_RECORD) as (fd, found):
            manifest = parse_manifest(read_opened(fd, found, LARGEST_RECORD, path))
        if own:
            if key.deps_key(manifest["deps"]) != os.path.basename(directory):
                raise ValueError("its name does not match its dependencies")
            if changed := _changes(directory, manifest, places, hasher, whole):
                return Refused(directory, "; ".join(changed))
        _check_payload(directory, manifest, listed)
        return Leaf(directory, manifest)
    except _UntrustedFile as error:
        return Refused(directory, str(error))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except MALFORMED as error:
        return Refused(directory, f"damaged: {describe_error(error)}", damaged=True)
    except OSError as error:
        return Refused(directory, f"unreadable: {error}")


class _UntrustedFile(Exception):
    """Why a file of a leaf is not trusted."""


@contextmanager
def _open_checked(path: str, listed: bool, limit: int) -> Iterator[tuple[int, os.stat_result]]:
    try:
        with open_regular(path, limit, os.O_NOFOLLOW) as (fd, found):
            if reason := fault(path, found, listed=listed):
                raise _UntrustedFile(reason)
            yield fd, found
    except UnusableFile as error:
        raise ValueError(str(error)) from error


def _changes(
    directory: str, manifest: dict[str, Any], places: Mapping[str, str], hasher: Hasher, whole: bool
) -> list[str]:
    """The facts of an entry that no longer hold, in words. A shipped entry only has the author's
    files as facts."""
    rows = None
    if whole:
        try:
            rows = read_sidecar(directory).get("facts")
        except FileNotFoundError:
            if not os.path.isdir(directory):
                raise  # it was just collected
            raise ValueError(f"{SIDECAR} is missing") from None
    return key.find_changes(manifest["deps"], rows, places, hasher)


def _check_payload(directory: str, manifest: dict[str, Any], listed: bool) -> None:
    for name, (size, sha256) in list_files(manifest).items():
        if "/" in name:
            raise ValueError("the payload's name contains a slash")
        try:
            with _open_checked(os.path.join(directory, name), listed, LARGEST) as (fd, found):
                if found.st_size != size or sha256_file(fd) != sha256:
                    raise ValueError(f"{name} has the wrong digest")
        except FileNotFoundError:
            raise ValueError(f"{name} is missing") from None
