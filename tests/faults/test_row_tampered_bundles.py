"""Row 26: a tampered bundle is refused, whatever was done to it, and nothing of it is taken."""

from __future__ import annotations

import io
import random
import re
import zipfile
from typing import TYPE_CHECKING

import pytest
from sample import layer

from opkiln.base.digest import sha256_file
from opkiln.errors import StoreError
from opkiln.machine.facts import Hasher
from opkiln.store import archive, bundle, sealed
from opkiln.store.entry import Refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Members = list[tuple[zipfile.ZipInfo, bytes]]

pytestmark = pytest.mark.row(26)

EACH = 5  # of ten kinds


def flip(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def append(data: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.randrange(1, 100))


def insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.randbytes(1) + data[at:]


def splice(data: bytes, chance: random.Random) -> bytes:
    """Put a piece of the file in another place of it."""
    source, target = sorted(chance.sample(range(0, len(data) - 64, 64), 2))
    return data[:target] + data[source : source + 64] + data[target + 64 :]


def rewritten(data: bytes, change: Callable[[Members], Members]) -> bytes:
    """A whole, proper zip with other members: the work of somebody with a zip tool."""
    with zipfile.ZipFile(io.BytesIO(data)) as before:
        members = [(each, before.read(each)) for each in before.infolist()]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as after:
        for info, content in change(members):
            after.writestr(info, content)
    return out.getvalue()


def add(data: bytes, chance: random.Random) -> bytes:
    name = f"v1/ops/somebody/evil/{'a' * 40}/{'b' * 40}/{layer.NAME}/evil{chance.random()}.so"

    def change(members: Members) -> Members:
        members.insert(chance.randrange(1, len(members) + 1), (zipfile.ZipInfo(name), b"evil"))
        return members

    return rewritten(data, change)


def take_away(data: bytes, chance: random.Random) -> bytes:
    def change(members: Members) -> Members:
        del members[chance.randrange(len(members))]
        return members

    return rewritten(data, change)


def rename(data: bytes, chance: random.Random) -> bytes:
    def change(members: Members) -> Members:
        info = members[chance.randrange(len(members))][0]
        info.filename = f"{chance.randrange(10)}{info.filename[1:]}"
        return members

    return rewritten(data, change)


def swap(data: bytes, chance: random.Random) -> bytes:
    """Two members have each other's contents, with checksums that are right."""

    def change(members: Members) -> Members:
        one, two = chance.sample(range(1, len(members)), 2)
        while members[one][1] == members[two][1]:
            one, two = chance.sample(range(1, len(members)), 2)
        (first, mine), (second, theirs) = members[one], members[two]
        members[one], members[two] = (first, theirs), (second, mine)
        return members

    return rewritten(data, change)


def replace(data: bytes, chance: random.Random) -> bytes:
    """A library of the same size in the place of another, with a checksum that is right."""

    def change(members: Members) -> Members:
        which = chance.choice([i for i, (info, _) in enumerate(members) if ".so" in info.filename])
        info, content = members[which]
        members[which] = (info, chance.randbytes(len(content)))
        return members

    return rewritten(data, change)


KINDS = [flip, cut, append, insert, splice, add, take_away, rename, swap, replace]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("bundle")
    chance = random.Random(26)
    for op in ("one", "two", "three"):
        layer.add(directory / "layer", op, b"\x7fELF" + chance.randbytes(chance.randrange(5000)))
    bundle.write_bundle(str(directory / "layer"), str(directory / "file"))
    return (directory / "file").read_bytes()


@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_mutated_bundle_is_refused_with_the_file_and_its_digest(
    kind: Callable[[bytes, random.Random], bytes], seed: int, good: bytes, tmp_path: Path
) -> None:
    mutated = kind(good, random.Random(seed))
    assert mutated != good
    file = tmp_path / "mutated.bundle"
    file.write_bytes(mutated)
    with pytest.raises(StoreError) as caught:
        bundle.unpack(str(file), str(tmp_path / "store" / "v1"))
    text = str(caught.value)
    assert str(file) in caught.value.what
    assert sha256_file(str(file)) in text
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_mutated_layer_serves_what_is_whole_or_nothing(
    kind: Callable[[bytes, random.Random], bytes], seed: int, good: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "mutated.bundle"
    file.write_bytes(good)
    entries = {}
    for op in ("one", "two", "three"):
        (leaf,) = archive.leaves(str(file), "somebody", op)
        entries[leaf] = archive.manifest(leaf)["sha256"]
    file.write_bytes(kind(good, random.Random(seed)))
    for leaf, digest in entries.items():
        sealed._kept.clear()  # as in a new process
        found = archive.examine(leaf, {}, Hasher())
        if isinstance(found, Refused):
            assert found.directory == leaf
        else:
            assert sha256_file(found.payload) == digest


def test_a_flip_of_any_byte_is_refused(good: bytes, tmp_path: Path) -> None:
    """Each byte counts: headers, names, padding, zip's own directory."""
    file = tmp_path / "mutated.bundle"
    for at in range(0, len(good), 7):
        file.write_bytes(good[:at] + bytes([good[at] ^ 0x20]) + good[at + 1 :])
        with pytest.raises(StoreError, match=re.escape(str(file))):
            bundle.read_bundle(str(file))
