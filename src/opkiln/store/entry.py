"""One leaf of the store: a finished file, its manifest, its sidecar and its log.

    <leaf>/manifest.json   what a hit reads: digests, target, dependencies; carries its own digest
           inputs.json     the long lists: what the keys were made of (for `explain`)
           build.log       what the compilers said
           <payload>       the library, module, program or object, as the compiler left it

A leaf is named by its deps_key and is never changed: it is good as it stands, or it is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from opkiln.digest import sha256_file
from opkiln.record import Record
from opkiln.store import shape
from opkiln.store.recheck import Hasher, recheck
from opkiln.trust import fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = 2  # 1 did not say what a library needs of the machine that loads it
MANIFEST = "manifest.json"
SIDECAR = "inputs.json"
LOG = "build.log"

_HEAD = '{"sha256":"'
_MIDDLE = '","manifest":'
_TAIL = "}\n"
_BODY_AT = len(_HEAD) + 64 + len(_MIDDLE)


class Leaf(Record):
    """A leaf that passed every check."""

    directory: str
    manifest: dict[str, Any]
    file: str = ""  # where the payload is, for a leaf that is no directory (``store.archive``)

    @property
    def payload(self) -> str:
        return self.file or os.path.join(self.directory, self.manifest["payload"])


class Refused(Record):
    """A leaf that did not, and why. ``damaged``: it can never be good again."""

    directory: str
    reason: str
    damaged: bool = False


def write_manifest(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as a file: valid JSON that carries the digest of its own body."""
    body = json.dumps(manifest, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f"{_HEAD}{digest}{_MIDDLE}{body}{_TAIL}".encode()


def parse_manifest(data: bytes, name: str = MANIFEST) -> dict[str, Any]:
    """The body of a manifest, or of another file in its form, whose digest holds and whose parts
    are of the right types. Raises ValueError, which says ``name`` where a part is not."""
    body = data[_BODY_AT : -len(_TAIL)]
    digest = hashlib.sha256(body).hexdigest()
    if data != f"{_HEAD}{digest}{_MIDDLE}".encode() + body + _TAIL.encode():
        raise ValueError("the manifest's digest does not match")
    try:
        manifest = json.loads(body)
    except RecursionError:
        raise ValueError("the manifest is nested too deeply") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise ValueError("the manifest has another schema")
    if digest not in _right:
        if told := shape.wrong(manifest):
            raise ValueError(f"{name}: {told}")
        if len(_right) >= _MOST_RIGHT:
            _right.clear()
        _right.add(digest)
    return manifest


_right: set[str] = set()  # digests of manifests whose types were right: each is read more than once
_MOST_RIGHT = 1000  # a check of a whole store must not take more memory for a larger one


def in_words(error: Exception) -> str:
    """What an exception says of the manifest that was read when it was raised."""
    if isinstance(error, KeyError):
        return f"{MANIFEST}: {error} is missing"
    if isinstance(error, (TypeError, AttributeError, RecursionError)):
        return f"{MANIFEST}: it is not as opkiln writes it ({type(error).__name__}: {error})"
    return str(error)


def read_sidecar(directory: str) -> dict[str, Any]:
    """The long lists of a leaf, if their digest holds. Raises OSError, ValueError."""
    with open(os.path.join(directory, SIDECAR), "rb") as file:
        return parse_manifest(file.read(), SIDECAR)


def examine(
    directory: str,
    places: Mapping[str, str],
    hasher: Hasher,
    *,
    listed: bool,
    external: bool,
    own: bool = True,
) -> Leaf | Refused | None:
    """Check a leaf: trust, manifest, dependencies, digest. None when there is no leaf (any more).

    ``external`` asks for the system's headers to be checked, too; ``own=False`` leaves out all
    dependencies (`cache verify` has no sources at hand).
    """
    manifest_path = os.path.join(directory, MANIFEST)
    try:
        if reason := fault(directory, os.lstat(directory), listed=listed):
            return Refused(directory, reason)
        fd = os.open(manifest_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(fd)
            if reason := fault(manifest_path, found, listed=listed):
                return Refused(directory, reason)
            data = os.read(fd, found.st_size + 1)
        finally:
            os.close(fd)
        manifest = parse_manifest(data)
        if own:
            now, changed = recheck(
                manifest["deps"], places, hasher, lambda: read_sidecar(directory), external=external
            )
            if now != os.path.basename(directory):
                return Refused(directory, "; ".join(changed) or "its dependencies have changed")
        return _check_payload(directory, manifest, listed)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Refused(directory, f"damaged: {in_words(error)}", damaged=True)
    except OSError as error:
        return Refused(directory, f"unreadable: {error}")


def _check_payload(directory: str, manifest: dict[str, Any], listed: bool) -> Leaf | Refused:
    name = manifest["payload"]
    if not isinstance(name, str) or "/" in name:
        return Refused(directory, "damaged: the payload's name holds a slash", damaged=True)
    path = os.path.join(directory, name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return Refused(directory, f"damaged: {name} is missing", damaged=True)
    try:
        found = os.fstat(fd)
        if reason := fault(path, found, listed=listed):
            return Refused(directory, reason)
        if found.st_size != manifest["size"] or sha256_file(fd) != manifest["sha256"]:
            return Refused(directory, f"damaged: {name} has another digest", damaged=True)
    finally:
        os.close(fd)
    return Leaf(directory, manifest)
