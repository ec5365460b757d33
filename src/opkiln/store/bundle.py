"""Writes a layer as one file, a bundle, and imports bundles into a store.

``store.archive`` defines the format and reads single entries in place. This module reads a bundle
as a whole: if one byte has changed, the file is refused before anything is taken from it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from opkiln.base.digest import LARGEST_BUNDLE, open_replacement, sha256_file
from opkiln.errors import StoreError
from opkiln.machine.facts import Hasher
from opkiln.store import entry, key, layer, publish
from opkiln.store.archive import INDEX, Bundle, Damaged, Member, NotABundle, write_index
from opkiln.store.layers import claim
from opkiln.store.zip_format import LARGEST, MOST_MEMBERS, Writer, chunks


class BundleFile(NamedTuple):
    """A bundle that was written."""

    path: str
    sha256: str  # of the file
    entries: int
    size: int


class ImportedEntry(NamedTuple):
    """An entry of a bundle that was imported."""

    op: str
    distribution: str
    directory: str
    new: bool  # False: the store had it already


# Writing


def write_bundle(layer_dir: str, file: str) -> BundleFile:
    """Write the entries of a layer, as ``store.layer`` writes them, to one file. The same entries
    give the same bytes. ``file`` appears whole or not at all. Raises StoreError if the layer is
    empty or damaged, or if the file cannot be written."""
    entries = layer.entries(layer_dir)
    paths = {
        f"{each.place}/{name}": os.path.join(each.directory, name)
        for each in entries
        for name in each.files
    }
    members = [
        (name, os.stat(path).st_size, sha256_file(path)) for name, path in sorted(paths.items())
    ]
    total = sum(size for _, size, _ in members)
    if total > LARGEST - (64 << 20) or len(members) > MOST_MEMBERS:
        raise StoreError(
            f"{len(members)} files of {total} bytes are too many for one bundle",
            why=f"a bundle has at most {LARGEST >> 30} GiB in {MOST_MEMBERS} files",
            hint="opkiln cache export FILE --op OP    # several bundles; each is a layer",
        )
    with replace_bundle(file, total) as out:
        archive = Writer(out)
        archive.add(INDEX, [write_index(members)])
        for name, _, sha256 in members:
            if archive.add(name, chunks(paths[name])).sha256.hex() != sha256:
                raise StoreError(
                    f"{paths[name]} (SHA-256 {sha256}) was changed while it was bundled"
                )
        archive.close()
    return BundleFile(file, sha256_file(file, LARGEST_BUNDLE), len(entries), os.stat(file).st_size)


@contextlib.contextmanager
def temporary_bundle(payloads: Iterable[str]) -> Iterator[BundleFile]:
    """A bundle of these libraries of the store, for as long as the block lasts. Raises
    StoreError."""
    with publish.scratch("pack") as stage:
        layer_dir = os.path.join(stage, "layer")
        layer.export(payloads, layer_dir)
        yield write_bundle(layer_dir, os.path.join(stage, "bundle"))


@contextlib.contextmanager
def replace_bundle(file: str, total: int) -> Iterator[BinaryIO]:
    """A new file that replaces ``file`` when all of it is on disk. Raises StoreError if it cannot
    be written. After any error ``file`` is unchanged, and no temporary file is left."""
    try:
        with open_replacement(file, sync=True) as out:
            yield out
    except OSError as error:
        raise StoreError(
            f"{file} cannot be written ({total} bytes): {error.strerror or error}",
            hint=f"ls -ld {shlex.quote(os.path.dirname(os.path.abspath(file)))}",
        ) from error


# Reading


def read_bundle(file: str) -> list[dict[str, Any]]:
    """The manifests of a bundle's entries, after every byte of it was checked. Raises StoreError,
    which names the file and the digests; Untrusted, a subclass, if ``OPKILN_TRUSTED_KEYS`` requires
    a signature that is missing."""
    with open_bundle(file) as bundle:
        return [manifest for _, manifest, _ in _entries(bundle)]


class Origin(NamedTuple):
    """The URL of a bundle, and what vouches for its digest: a lock file, or a trusted key
    whose signature was verified. It becomes part of the manifests of its entries."""

    url: str
    sha256: str
    by: tuple[str, str]  # ("lock", the file) or ("key", the key)


def unpack(
    file: str,
    root: str,
    *,
    sha256: str = "",
    signed: bool = True,
    origin: Origin | None = None,
    places: Mapping[str, str] | None = None,
) -> list[ImportedEntry]:
    """Publish each entry of a bundle in the store at ``root`` (``Store.root``).

    With ``signed=False`` no signature is required: opkiln itself has just written the file. Nor is
    one for a bundle of a remote tier, which has an ``origin``. Everything is checked before the
    first entry is published, and each appears whole or not at all. ``sha256`` is the digest that
    the file must have. ``places`` are the anchors of an object here: its facts get this machine's
    signatures. Raises StoreError, as ``read_bundle`` does.
    """
    note: dict[str, Any] = {} if places is None else {"places": dict(places)}
    if origin is not None:
        sha256, signed = origin.sha256, False
        note |= {entry.FETCHED: dict([("url", origin.url), ("sha256", sha256), origin.by])}
    with open_bundle(file, sha256, signed=signed) as bundle:
        entries = list(_entries(bundle))
        claim(root)
        return [_publish(bundle, *each, root, note) for each in entries]


def unpack_bytes(
    data: bytes,
    root: str,
    *,
    sha256: str = "",
    signed: bool = True,
    places: Mapping[str, str] | None = None,
) -> None:
    """``unpack`` for a bundle in memory."""
    with publish.scratch("fetch") as stage:
        file = os.path.join(stage, "bundle")
        with open(file, "xb") as out:
            out.write(data)
        unpack(file, root, sha256=sha256, signed=signed, places=places)


@contextlib.contextmanager
def open_bundle(file: str, sha256: str = "", *, signed: bool = True) -> Iterator[Bundle]:
    """A bundle of which every byte was checked. Damage that is found, now or within the block, is a
    StoreError. With ``signed=False`` no signature is required."""
    try:
        with Bundle(file) as bundle:
            if sha256 and (found := bundle.digest()) != sha256.lower():
                raise Damaged(f"it has the SHA-256 {found}, not {sha256.lower()}")
            bundle.check()
            if signed:
                bundle.authenticate()
            yield bundle
    except (Damaged, NotABundle) as error:
        why = f"the whole file has the SHA-256 {sha256_file(file, LARGEST_BUNDLE)}"
        hint = f"sha256sum {shlex.quote(file)}    # compare it with the original; copy that again"
        if isinstance(error, NotABundle):
            why = f"{error.why}; {why}"
            raise StoreError(error.what, why=why, hint=error.hint or hint) from error
        raise StoreError(f"{file} is refused: {error}", why=why, hint=hint) from error
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror or error}") from error


def _entries(bundle: Bundle) -> Iterator[tuple[str, dict[str, Any], dict[str, Member]]]:
    """(path, manifest, files) of each entry. Raises Damaged if its parts do not agree."""
    for leaf, files in bundle.index.entries.items():
        try:
            manifest = entry.parse_manifest(bundle.read(files[entry.MANIFEST]))
            entry.parse_manifest(bundle.read(files[entry.SIDECAR]), entry.SIDECAR)
            own = entry.list_files(manifest)
            place = leaf.split("/")
            agree = (
                layer.identity(manifest) == (*place[2:4], place[-1])
                and own == {name: (files[name].size, files[name].sha256) for name in own}
                and set(files) == {entry.MANIFEST, entry.SIDECAR, *own}
            )
        except entry.MALFORMED as error:
            raise Damaged(f"{leaf}: {entry.describe_error(error)}") from error
        if not agree:
            digest = files[entry.MANIFEST].sha256
            raise Damaged(f"{leaf} does not match its manifest (SHA-256 {digest})")
        yield leaf, manifest, files


def _publish(
    bundle: Bundle,
    leaf: str,
    manifest: dict[str, Any],
    files: dict[str, Member],
    root: str,
    note: dict[str, Any],
) -> ImportedEntry:
    relative = leaf.partition("/")[2]
    final = os.path.join(root, relative)
    found = entry.examine(final, {}, Hasher(), listed=False, whole=False, own=False)
    new = not isinstance(found, entry.Leaf)  # a damaged one is replaced
    if new:
        with publish.scratch("import") as stage:
            for name, member in files.items():
                mode = 0o700 if name == manifest["payload"] else 0o600
                with publish.create(os.path.join(stage, name), mode) as out:
                    if note and name == entry.MANIFEST:
                        out.write(entry.write_manifest({**manifest, **note}))
                    elif "places" in note and name == entry.SIDECAR:
                        lists = entry.parse_manifest(bundle.read(member), name)
                        signed = key.sign(key.read(lists["facts"]), note["places"], Hasher())
                        out.write(entry.write_manifest({**lists, "facts": key.rows(signed)}))
                    else:
                        bundle.copy(member, out)
            # Readers refuse a damaged entry that cannot be moved away.
            with contextlib.suppress(OSError):
                publish.discard(root, final)
            publish.publish(stage, root, relative)
    name, owner = manifest.get("op", manifest.get("source", "")), manifest.get("distribution", "")
    return ImportedEntry(name, owner, final, new)
