"""A bundle: the whole file, or an index of somebody's making before a file that is as it should."""

from __future__ import annotations

from zlib import crc32

from fuzz.manifest import with_digest
from fuzz.scratch import file

from opkiln.errors import StoreError
from opkiln.machine.facts import Hasher
from opkiln.store import archive, bundle, sealed, zip_format


def one(data: bytes) -> None:
    _use(data)
    body, _, rest = data.partition(b"\n--\n")
    index = with_digest(body)
    head = (
        zip_format.local_header(
            zip_format.stored_header(archive.INDEX, len(index), crc32(index), 0)
        )
        + index
    )
    _use(head + rest)


def _use(data: bytes) -> None:
    archive._indexes.clear()
    path = file("bundle", data)
    try:
        bundle.read_bundle(path)
    except StoreError:
        pass
    try:
        leaves = archive.leaves(path, "somebody", "one")
    except (StoreError, ValueError, OSError):
        leaves = [f"{path}!v1/ops/somebody/one/x"]
    for leaf in leaves[:2]:
        archive.examine(leaf, {}, Hasher())
        archive.examine(leaf, {}, Hasher(), own=False)
    for kept in sealed._kept.values():
        sealed.os.close(int(kept.rpartition("/")[2]))
    sealed._kept.clear()
    sealed._last = 2
