"""An entry's manifest and sidecar: from a shared layer, or from a store that somebody damaged."""

from __future__ import annotations

import os
from pathlib import Path

from fuzz.scratch import directory

from opkiln.machine.facts import Hasher
from opkiln.store import entry
from opkiln.store.inventory import OBJECT, OP, StoreEntry, details

PAYLOAD = b"\x7fELF"


def with_digest(body: bytes) -> bytes:
    """A file as ``write_manifest`` writes it, whatever its body is."""
    import hashlib

    digest = hashlib.sha256(body).hexdigest()
    return b'{"sha256":"' + digest.encode() + b'","manifest":' + body + b"}\n"


def one(data: bytes) -> None:
    for text in (data, with_digest(data)):
        try:
            entry.parse_manifest(text)
        except ValueError:
            pass
        # The file's first half as the manifest of a leaf, its second as the long lists.
        _leaf(text, text)


def _leaf(manifest: bytes, lists: bytes) -> None:
    leaf = Path(directory(), "leaf")
    leaf.mkdir(exist_ok=True)
    leaf.chmod(0o700)
    for name, content in (
        (entry.MANIFEST, manifest),
        (entry.SIDECAR, lists),
        ("op.so", PAYLOAD),
    ):
        (leaf / name).write_bytes(content)
    places = {"src": str(leaf), "opkiln": str(leaf), "abs": "", "outside": ""}
    for own in (True, False):
        found = entry.examine(str(leaf), places, Hasher(), listed=True, whole=own, own=own)
        assert found is None or isinstance(found, (entry.Leaf, entry.Refused))
    for kind in (OP, OBJECT):
        details(StoreEntry(str(leaf), kind, "op", "", 0, 0.0, 0.0, os.path.join(leaf, "op.so")))
