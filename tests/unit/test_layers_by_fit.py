"""Which entry of a layer serves: the best that fits, can be opened, and has today's sources."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from sample.decisions import World

from opkiln.base.digest import sha256_file
from opkiln.base.model import CUDA, OUTSIDE, PACKAGE, Artifact
from opkiln.decision import prebuilt
from opkiln.decision.terms import Trace
from opkiln.errors import LoadError
from opkiln.machine import facts, uname
from opkiln.store import bundle, entry, key

if TYPE_CHECKING:
    from pathlib import Path

RUNS = "its sources are today's, and its code for {} runs here"


@pytest.fixture
def world(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(uname, "cpu_flags", lambda: "one two three")
    return World(tmp_path, cache, monkeypatch)


class Shelf:
    """Layers, and the search through them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.request = world.request()
        self.layers: list[str] = []
        self.own: list[str] = []

    def add(self, layer: str, payload: bytes = b"code", *, number: int = 0, own: bool = False,
            **changes: Any) -> Path:  # fmt: skip
        place = self.world.base / layer
        listed = self.own if own else self.layers
        if str(place / "v1") not in listed:
            listed.append(str(place / "v1"))
        return self.world.add(place, payload, build=f"{number:040}", **changes)

    def find(self, resort: str = prebuilt.LAYER) -> tuple[Artifact | None, list[tuple[str, ...]]]:
        trace = Trace()
        found = prebuilt.find(self.request, self.layers, trace, resort, self.own)
        return found, [tuple(each) for each in trace.candidates]


@pytest.fixture
def shelf(world: World) -> Shelf:
    return Shelf(world)


def artifact(library: Path, origin: str) -> Artifact:
    return Artifact(str(library), hashlib.sha256(library.read_bytes()).hexdigest(), origin)


def older(library: Path) -> Path:
    """Have an entry be older than the others of its layer, which are looked at before it."""
    os.utime(library.parents[1], (1, 1))
    return library


def test_entry_that_fits_best_serves_whichever_layer_it_is_in(shelf: Shelf) -> None:
    shelf.add("first", needs={"cpu": ["one"]})
    best = shelf.add("second", b"best", needs={"cpu": ["one", "two"]},
                     target={"cpu": "fast", "cpu_features": ["one", "two"]})  # fmt: skip
    shelf.add("third")
    found, told = shelf.find()
    assert found == artifact(best, "layer")
    assert told == [("layer", "taken", RUNS.format("fast+one+two"), str(best))]


def test_of_equals_the_users_own_goes_first_and_then_the_first_layers(shelf: Shelf) -> None:
    first = shelf.add("first")
    shelf.add("second")
    assert shelf.find()[0] == artifact(first, "layer")
    imported = shelf.add("own", own=True)
    found, told = shelf.find()
    assert found == artifact(imported, "store")
    assert [each[0] for each in told] == ["store"]


def test_of_equals_in_a_layer_the_newest_serves(shelf: Shelf) -> None:
    newest = shelf.add("layer", number=5)
    os.utime(newest.parents[1], (2, 2))
    for number in (4, 6):
        older(shelf.add("layer", number=number))
        assert shelf.find()[0] == artifact(newest, "layer")


def test_what_was_built_in_the_users_own_store_is_not_looked_at(shelf: Shelf) -> None:
    shelf.add("own", own=True, created=1.0)
    assert shelf.find() == (None, [])
    imported = older(shelf.add("own", own=True, number=1))
    assert shelf.find()[0] == artifact(imported, "store")
    shutil.rmtree(imported.parents[1])
    built = shelf.add("listed", created=1.0)  # what another user built there is
    assert shelf.find()[0] == artifact(built, "layer")


def test_only_the_library_that_is_asked_for_serves_however_it_came_there(shelf: Shelf) -> None:
    shelf.add("layer", b"other")
    built = shelf.add("own", b"wanted", own=True, created=1.0)
    wanted = artifact(built, "store")
    found = prebuilt.find(shelf.request, shelf.layers, Trace(), prebuilt.LAYER, shelf.own,
                          only=wanted.sha256)  # fmt: skip
    assert found == wanted


@pytest.mark.parametrize("trusted", ["key", "lock"])
def test_entry_that_came_from_a_remote_tier_says_from_where_and_who_is_trusted(
    shelf: Shelf, trusted: str
) -> None:
    assert prebuilt.fetched_from({}) == ""
    shelf.add("layer", fetched={"url": "https://ops.example", trusted: "K"})
    ((_, verdict, told, _),) = shelf.find()[1]
    assert verdict == "taken"
    assert told.endswith("runs here; fetched from https://ops.example, trusted by K")


def test_resort_is_what_the_caller_calls_it(shelf: Shelf) -> None:
    library = shelf.add("carried")
    found, told = shelf.find(prebuilt.PREBUILT)
    assert found == artifact(library, "prebuilt")
    assert [each[0] for each in told] == ["prebuilt"]


def test_flags_of_the_environment_count_for_listed_layers_and_not_for_packages(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "-O1")
    shelf.add("layer")
    assert shelf.find()[0] is None
    assert shelf.find(prebuilt.PREBUILT)[0] is not None


def test_entry_of_another_backend_is_passed_in_silence(shelf: Shelf) -> None:
    shelf.add("layer", target={"backend": CUDA})
    assert shelf.find() == (None, [])
    good = older(shelf.add("layer", number=1))
    assert shelf.find()[0] == artifact(good, "layer")


def test_entry_that_does_not_fit_is_told_and_the_next_serves(shelf: Shelf) -> None:
    misfit = shelf.add("layer", number=1, target={"machine": "riscv64"})
    lacking = shelf.add("layer", number=2, needs={"cpu": ["one"], "sonames": ["libno.so.1"]})
    good = shelf.add("layer", number=3, target={"archs": ["9.0", "10.0"]})
    found, told = shelf.find()
    assert found == artifact(good, "layer")
    assert told == [
        ("layer", "refused", f"it is for {uname.system()} on riscv64", str(misfit.parent)),
        ("layer", "refused", "it needs libno.so.1, which is not here", str(lacking.parent)),
        ("layer", "taken", RUNS.format("9.0;10.0"), str(good)),
    ]


def test_entry_that_could_not_be_opened_is_told_and_the_next_serves(shelf: Shelf) -> None:
    broken = shelf.add("layer", number=1, needs={"cpu": ["one"]})
    good = shelf.add("layer", number=2)
    shelf.request.cannot_open[str(broken)] = LoadError("no", why="undefined symbol")
    found, told = shelf.find()
    assert found == artifact(good, "layer")
    assert told[0] == ("layer", "refused", "undefined symbol", str(broken))


def test_damaged_entry_is_told_in_a_layer_and_passed_in_the_users_own_store(
    shelf: Shelf,
) -> None:
    for layer, own in (("own", True), ("layer", False)):
        (shelf.add(layer, number=1, own=own).parent / entry.MANIFEST).write_bytes(b"{}")
    good = older(shelf.add("layer", number=2))
    found, told = shelf.find()
    assert found == artifact(good, "layer")
    assert [each[:3] for each in told[:-1]] == [
        ("layer", "refused", "damaged: the manifest's digest does not match")
    ]


def test_library_that_is_damaged_is_told_and_the_next_serves(shelf: Shelf) -> None:
    bad = shelf.add("layer", number=1, needs={"cpu": ["one"]})
    bad.write_bytes(b"CODE")
    good = shelf.add("layer", number=2)
    found, told = shelf.find()
    assert found == artifact(good, "layer")
    assert told[0] == (
        "layer", "refused", "damaged: op.so has the wrong digest", str(bad.parent),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"needs": {"cpu": ["one"], "symbols": [["a"]]}},
     {"needs": {"cpu": ["one"]}, "target": {"archs": [9]}}],
    ids=["needs", "target"],
)  # fmt: skip
def test_manifest_that_cannot_be_understood_is_damaged(shelf: Shelf, changes: Any) -> None:
    bad = shelf.add("layer", number=1, **changes)
    good = shelf.add("layer", number=2)
    found, told = shelf.find()
    assert found == artifact(good, "layer")
    assert told[0][:2] == ("layer", "refused")
    assert told[0][2].startswith("damaged: ")
    assert told[0][3] == str(bad.parent)


def test_entry_whose_needs_cannot_be_asked_for_is_told_and_the_next_serves(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = shelf.add("layer", number=1, needs={"cpu": ["one"]})
    good = shelf.add("layer", number=2)
    lacking = prebuilt.missing_needs

    def asked(needs: Any, abi: str) -> str:
        if needs["cpu"]:
            raise LoadError("libtorch.so is cut off")
        return lacking(needs, abi)

    monkeypatch.setattr(prebuilt, "missing_needs", asked)
    found, told = shelf.find()
    assert found == artifact(good, "layer")
    assert told[0] == ("layer", "refused", "damaged: libtorch.so is cut off", str(bad.parent))


def test_entry_that_others_of_a_group_may_write_serves_from_a_listed_layer_alone(
    shelf: Shelf,
) -> None:
    imported, listed = shelf.add("own", own=True), shelf.add("layer")
    for library in (imported, listed):
        library.chmod(0o664)
    found, told = shelf.find()
    assert found == artifact(listed, "layer")
    assert told[0][:2] == ("store", "refused")
    assert "is writable by others" in told[0][2]


def test_entry_that_is_removed_meanwhile_and_what_is_hidden_are_passed(shelf: Shelf) -> None:
    gone = shelf.add("layer", number=1)
    good = shelf.add("layer", number=2)
    (gone.parent / entry.MANIFEST).unlink()
    shutil.copytree(good.parent, good.parents[1] / ".being-made")
    older(good)
    found, told = shelf.find()
    assert found == artifact(good, "layer")
    assert len(told) == 1


def test_layer_that_everybody_may_write_to_is_refused(shelf: Shelf) -> None:
    library = shelf.add("layer")
    library.parents[2].chmod(0o777)
    found, told = shelf.find()
    assert found is None
    assert told == [
        ("layer", "refused", f"{library.parents[2]} is writable by everybody", str(library.parent))
    ]
    library.parents[2].chmod(0o755)
    library.parents[1].chmod(0o777)
    good = older(shelf.add("layer", number=1))
    assert shelf.find()[0] == artifact(good, "layer")


def test_layer_that_is_not_there_has_nothing(shelf: Shelf) -> None:
    shelf.layers.append(str(shelf.world.base / "nowhere/v1"))
    assert shelf.find() == (None, [])


# Sources


def with_source(shelf: Shelf, text: str = "int a;") -> Path:
    """An entry that was built from ``a.cpp`` with this text, by a path of its package."""
    return built_from(shelf, ("src", "a.cpp", hashlib.sha256(text.encode()).hexdigest()))


def built_from(shelf: Shelf, *files: tuple[str, str, str]) -> Path:
    """An entry that was built from these files: anchor, path and digest."""
    recorded = {"own": list(map(list, files)), "others": "of another machine"}
    library = shelf.add("layer", deps=recorded)
    leaf = library.parent.with_name(key.deps_key(recorded))
    library.parent.rename(leaf)
    return leaf / "op.so"


def test_headers_of_opkiln_and_of_other_places_count_where_they_are(shelf: Shelf) -> None:
    header = shelf.world.base / "far" / "own.h"
    header.parent.mkdir()
    header.write_text("// own")
    ours = os.path.join(PACKAGE, "csrc", "opkiln", "random_bits.h")
    library = built_from(
        shelf,
        ("opkiln", os.path.relpath(ours, PACKAGE), sha256_file(ours)),
        ("abs", str(header), sha256_file(str(header))),
        (OUTSIDE, "/nowhere/system.h", "0" * 64),
    )
    assert shelf.find()[0] == artifact(library, "layer")
    header.write_text("// edited")
    assert shelf.find()[0] is None


def test_entry_of_todays_sources_serves_and_of_others_does_not(shelf: Shelf) -> None:
    library = with_source(shelf)
    assert shelf.find()[0] == artifact(library, "layer")
    (shelf.world.package / "a.cpp").write_text("int b;")
    found, told = shelf.find()
    assert found is None
    assert told == [("layer", "refused", "a.cpp changed", str(library.parent))]


def test_package_that_ships_no_sources_is_served_without_a_look_at_them(shelf: Shelf) -> None:
    library = with_source(shelf)
    (shelf.world.package / "a.cpp").unlink()
    assert shelf.find()[0] == artifact(library, "layer")
    library.write_bytes(b"CODE")
    assert shelf.find()[0] is None


def test_package_that_ships_some_of_its_sources_is_held_to_them(world: World) -> None:
    world.spec = world.spec._replace(sources=("a.cpp", "b.cpp"))
    shelf = Shelf(world)
    with_source(shelf)
    (world.package / "a.cpp").unlink()
    (world.package / "b.cpp").write_text("")
    assert shelf.find()[0] is None


def test_inline_source_is_in_no_file_that_could_be_missing(world: World) -> None:
    world.spec = world.spec._replace(inline=(("a.cpp", "int a;"),))
    shelf = Shelf(world)
    with_source(shelf)
    (world.package / "a.cpp").unlink()
    assert shelf.find()[0] is None


def test_facts_of_the_machine_that_built_an_entry_are_not_checked_here(shelf: Shelf) -> None:
    library = shelf.add("layer")
    gone = key.Fact("file", "abs", "/nowhere/vector", "0" * 64, facts.UNSIGNED)
    sidecar = {"schema": entry.SCHEMA, "facts": key.rows([gone])}
    (library.parent / entry.SIDECAR).write_bytes(entry.write_manifest(sidecar))
    assert shelf.find()[0] == artifact(library, "layer")


# Bundles


def test_bundle_serves_like_a_layer_and_is_told_by_its_place_in_the_file(shelf: Shelf) -> None:
    shelf.add("made", created=1.0)
    file = shelf.world.base / "ops.bundle"
    bundle.write_bundle(str(shelf.world.base / "made"), str(file))
    shelf.layers[:] = [str(file)]
    found, told = shelf.find()
    assert found is not None
    assert found.origin == "layer"
    assert found.sha256 == hashlib.sha256(b"code").hexdigest()
    ((resort, verdict, _, subject),) = told
    assert (resort, verdict) == ("layer", "taken")
    assert subject.startswith(f"{file}!v1/ops/dist/op/")
    shelf.world.spec = shelf.world.spec._replace(name="other")
    shelf.request = shelf.world.request()
    assert shelf.find() == (None, [])


def test_bundle_for_a_package_without_sources_is_served_without_a_look_at_them(
    shelf: Shelf,
) -> None:
    with_source(shelf, "other text")
    file = shelf.world.base / "ops.bundle"
    bundle.write_bundle(str(shelf.world.base / "layer"), str(file))
    shelf.layers[:] = [str(file)]
    assert shelf.find()[0] is None
    (shelf.world.package / "a.cpp").unlink()
    assert shelf.find()[0] is not None


def test_file_that_is_not_a_bundle_is_refused(shelf: Shelf) -> None:
    file = shelf.world.base / "ops.bundle"
    file.write_text("not a bundle")
    shelf.layers[:] = [str(file)]
    found, ((resort, verdict, reason, subject),) = shelf.find()
    assert found is None
    assert (resort, verdict, subject) == ("layer", "refused", str(file))
    assert str(file) in reason
    assert "hint" not in reason
