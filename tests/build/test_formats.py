"""What opkiln writes is as docs/reference/formats.md says: a reader that knows only that page reads
a store and a bundle that were just made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import independent_reader as reader
from sample.formats_page import fields, fields_where

from opkiln.store import bundle, layer, signing

if TYPE_CHECKING:
    from sample.package import Package

pytestmark = pytest.mark.usefixtures("warm")


def names(found: dict[str, Any], *inner: str) -> set[str]:
    """The fields of an object, and of those objects in it that have fields of their own."""
    own = {f"{each}.{name}" for each in inner if each in found for name in found[each]}
    return set(found) | own


@pytest.fixture
def built(plain: Package, cache: Path) -> tuple[Path, reader.Entry]:
    """(the store, its one entry), read by the page."""
    plain.load()
    (found,) = reader.store(cache)
    return cache, found


@pytest.fixture
def shipped(built: tuple[Path, reader.Entry], tmp_path: Path) -> Path:
    """A bundle of that entry."""
    store, found = built
    layer.export([str(store / found.place / found.manifest["payload"])], str(tmp_path / "layer"))
    bundle.write_bundle(str(tmp_path / "layer"), str(tmp_path / "ops.bundle"))
    return tmp_path / "ops.bundle"


def test_a_built_entry_has_the_fields_and_keys_that_the_page_gives(
    built: tuple[Path, reader.Entry],
) -> None:
    _, found = built
    nested = {*fields("Target"), *fields("Needs"), "deps.own", "deps.others"}
    documented = fields_where("Manifest", "all", "entries") | nested
    assert names(found.manifest, "target", "needs", "deps") == documented
    sidecar = fields_where("Sidecar", "all", "entries") - {"inputs.spec.sources"}
    assert names(found.sidecar, "inputs") == sidecar


@pytest.mark.counts_compiles
def test_objects_have_the_fields_that_the_page_gives(built: tuple[Path, reader.Entry]) -> None:
    store, _ = built
    manifests = sorted(store.glob("v1/objects/*/*/*/manifest.json"))
    assert manifests
    for path in manifests:
        found = reader.body(path.read_bytes())
        assert set(found) == fields_where("Manifest", "all", "objects")
        assert path.parts[-4] == path.parts[-3][:2]
        own, others = found["deps"]["own"], found["deps"]["others"]
        assert reader.key("deps", (own, others)) == path.parent.name
        lists = reader.body((path.parent / "inputs.json").read_bytes())
        assert reader.dependencies(lists["facts"]) == found["deps"]


def test_a_receipt_has_the_fields_that_the_page_gives(
    built: tuple[Path, reader.Entry], plain: Package
) -> None:
    store, found = built
    plain.load()  # a full search that hits leaves one
    (receipt,) = (json.loads(path.read_bytes()) for path in store.glob("v1/receipts/*/*/*.json"))
    assert set(receipt) == set(fields("Receipt"))
    assert store / "v1" / receipt["payload"] == store / found.place / found.manifest["payload"]
    assert len(receipt["signatures"]) == 4 * len(receipt["files"])
    assert receipt["sha256"] == found.manifest["sha256"]


def test_a_bundle_is_read_by_what_the_page_says(
    built: tuple[Path, reader.Entry], shipped: Path
) -> None:
    (found,) = reader.bundle(shipped).entries
    assert found.payload == built[1].payload
    assert names(found.manifest) == fields_where("Manifest", "all", "shipped")
    assert names(found.sidecar) == {"schema", "inputs"}
    assert {row[0] for row in found.manifest["deps"]["own"]} <= {"src", "opkiln", "outside"}
    assert found.manifest["deps"]["others"] == found.manifest["sha256"]


def test_a_signature_is_verified_by_what_the_page_says(shipped: Path, tmp_path: Path) -> None:
    assert reader.bundle(shipped).signatures == []
    pairs = [signing.generate(str(tmp_path / name)) for name in ("one.key", "two.key")]
    for pair in pairs:
        signing.sign(str(shipped), pair.private)
    assert reader.signed_by(reader.bundle(shipped)) == sorted(pair.key for pair in pairs)


def test_the_reader_notices_one_byte_that_changed(shipped: Path) -> None:
    whole = shipped.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 50)):
        changed = bytearray(whole)
        changed[place] ^= 1
        shipped.write_bytes(changed)
        with pytest.raises((reader.Refused, ValueError, KeyError)):
            reader.bundle(shipped)
