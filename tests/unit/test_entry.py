"""A leaf of the store is good as it stands, or it is refused with the reason."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from opkiln.base.digest import sha256_file
from opkiln.base.trust import fault
from opkiln.machine import facts
from opkiln.store import entry, key
from opkiln.store.entry import Leaf, Refused

if TYPE_CHECKING:
    from pathlib import Path

PAYLOAD = b"\x7fELF" + bytes(range(256)) * 8


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """A leaf without dependencies."""
    import hashlib

    recorded = key.manifest_facts([])
    directory = tmp_path / key.deps_key(recorded)
    directory.mkdir(mode=0o700)
    manifest = {
        "schema": entry.SCHEMA,
        "payload": "op.so",
        "size": len(PAYLOAD),
        "sha256": hashlib.sha256(PAYLOAD).hexdigest(),
        "deps": recorded,
    }
    (directory / "op.so").write_bytes(PAYLOAD)
    (directory / "manifest.json").write_bytes(entry.write_manifest(manifest))
    sidecar = {"schema": entry.SCHEMA, "facts": []}
    (directory / "inputs.json").write_bytes(entry.write_manifest(sidecar))
    for file in directory.iterdir():
        file.chmod(0o600)
    return directory


def examine(directory: Path, *, listed: bool = False) -> Leaf | Refused | None:
    return entry.examine(str(directory), {}, facts.Hasher(), listed=listed, whole=True)


def refusal(directory: Path, *, listed: bool = False) -> Refused:
    found = examine(directory, listed=listed)
    assert isinstance(found, Refused)
    return found


def test_an_intact_leaf_is_good(leaf: Path) -> None:
    found = examine(leaf)
    assert isinstance(found, Leaf)
    assert found.payload == str(leaf / "op.so")


def test_no_leaf_is_no_refusal(tmp_path: Path) -> None:
    assert examine(tmp_path / "absent") is None


@pytest.mark.parametrize("at", [0, 5, 1000, len(PAYLOAD) - 1])
def test_a_flipped_byte_in_the_library_is_damage(leaf: Path, at: int) -> None:
    data = bytearray(PAYLOAD)
    data[at] ^= 1
    (leaf / "op.so").write_bytes(data)
    assert refusal(leaf) == Refused(str(leaf), "damaged: op.so has the wrong digest", damaged=True)


@pytest.mark.parametrize("size", [0, 1, len(PAYLOAD) - 1])
def test_a_library_cut_short_is_damage(leaf: Path, size: int) -> None:
    os.truncate(leaf / "op.so", size)
    assert refusal(leaf).damaged


def test_a_missing_library_is_damage(leaf: Path) -> None:
    (leaf / "op.so").unlink()
    assert refusal(leaf) == Refused(str(leaf), "damaged: op.so is missing", damaged=True)


def test_every_flipped_byte_of_a_manifest_is_damage(leaf: Path) -> None:
    path = leaf / "manifest.json"
    whole = path.read_bytes()
    significant = range(len(whole) - 2)  # all but the closing brace and the newline
    for at in significant:
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        found = examine(leaf)
        head = at < entry._BODY_AT and not (len(entry._HEAD) <= at < len(entry._HEAD) + 64)
        # The fixed words around the digest carry no information; everything else must show.
        assert head or (isinstance(found, Refused) and found.damaged), at


@pytest.mark.parametrize("size", [0, 10, 100, 200])
def test_a_manifest_cut_short_is_damage(leaf: Path, size: int) -> None:
    os.truncate(leaf / "manifest.json", size)
    assert refusal(leaf).damaged


def test_a_payload_outside_the_leaf_is_refused(leaf: Path) -> None:
    manifest = entry.parse_manifest((leaf / "manifest.json").read_bytes())
    manifest["payload"] = "../op.so"
    (leaf / "manifest.json").write_bytes(entry.write_manifest(manifest))
    assert "slash" in refusal(leaf).reason


def test_a_leaf_under_another_name_is_refused(leaf: Path, tmp_path: Path) -> None:
    other = tmp_path / ("0" * 40)
    os.rename(leaf, other)
    assert refusal(other).damaged
    assert refusal(other).reason == "damaged: its name does not match its dependencies"


def test_a_leaf_without_its_facts_is_damage_unless_it_was_shipped_so(leaf: Path) -> None:
    sidecar = leaf / "inputs.json"
    sidecar.write_bytes(entry.write_manifest({"schema": entry.SCHEMA}))
    assert isinstance(examine(leaf), Leaf)
    sidecar.write_bytes(sidecar.read_bytes().replace(b"2", b"3"))
    assert refusal(leaf).damaged
    sidecar.unlink()
    assert refusal(leaf) == Refused(str(leaf), "damaged: inputs.json is missing", damaged=True)


def test_a_leaf_is_refused_for_each_fact_that_does_not_hold(leaf: Path, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    source = tmp_path / "src" / "a.cpp"
    source.write_text("int a;")
    known = [
        key.Fact("file", "src", "a.cpp", sha256_file(str(source)), facts.UNSIGNED),
        key.Fact("absent", "src", "", "new.h", facts.UNSIGNED),
    ]
    manifest = entry.read_manifest(str(leaf))
    manifest["deps"] = key.manifest_facts(known)
    (leaf / "manifest.json").write_bytes(entry.write_manifest(manifest))
    sidecar = {"schema": entry.SCHEMA, "facts": key.rows(known)}
    (leaf / "inputs.json").write_bytes(entry.write_manifest(sidecar))
    named = leaf.with_name(key.deps_key(manifest["deps"]))
    leaf.rename(named)
    places = {"src": str(tmp_path / "src")}

    def reason(*, whole: bool) -> str:
        found = entry.examine(str(named), places, facts.Hasher(), listed=False, whole=whole)
        return found.reason if isinstance(found, Refused) else ""

    assert (reason(whole=True), reason(whole=False)) == ("", "")
    (tmp_path / "src" / "new.h").touch()
    new = f"{tmp_path}/src/new.h is new"
    assert (reason(whole=True), reason(whole=False)) == (new, "")
    source.write_text("int b;")
    assert (reason(whole=True), reason(whole=False)) == (f"a.cpp changed; {new}", "a.cpp changed")


def test_a_symbolic_link_is_never_followed(leaf: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.so"
    os.rename(leaf / "op.so", real)
    (leaf / "op.so").symlink_to(real)
    assert isinstance(examine(leaf), Refused)
    os.unlink(leaf / "op.so")
    os.rename(real, leaf / "op.so")
    moved = tmp_path / "moved"
    os.rename(leaf, moved)
    leaf.symlink_to(moved)
    assert "symbolic link" in refusal(leaf).reason


@pytest.mark.parametrize("name", [".", "manifest.json", "op.so"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_to_is_not_loaded(leaf: Path, name: str, mode: int) -> None:
    path = leaf / name
    path.chmod(path.stat().st_mode | mode)
    assert "writable by others" in refusal(leaf).reason


@pytest.mark.parametrize("name", [".", "manifest.json", "op.so"])
def test_a_listed_layer_may_be_a_groups_but_not_everybodys(leaf: Path, name: str) -> None:
    path = leaf / name
    path.chmod(path.stat().st_mode | 0o020)
    assert isinstance(examine(leaf, listed=True), Leaf)
    path.chmod(path.stat().st_mode | 0o002)
    assert "writable by everybody" in refusal(leaf, listed=True).reason


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [".", "manifest.json", "op.so"])
def test_what_belongs_to_somebody_else_is_loaded_from_a_listed_layer_only(
    leaf: Path, name: str
) -> None:
    os.chown(leaf / name, 65534, 65534)
    assert "belongs to uid 65534" in refusal(leaf).reason
    assert isinstance(examine(leaf, listed=True), Leaf)


def test_roots_files_are_trusted_by_every_user(monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.stat("/")
    assert found.st_uid == 0
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert fault("/", found) == ""
