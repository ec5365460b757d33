"""Row 16: what another user could have planted is not loaded; a private directory is used instead.

The planted library is as good as a forger can make it: in its place, with digests that hold.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loaders import Answer, Loader, leaves, returning, write
from sample import child, known

from opkiln.base.digest import sha256_file
from opkiln.store.entry import parse_manifest, write_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.row(16),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else"),
]

USER, OTHER = child.NOBODY, 12345
GOOD, PLANTED = 16, 666


class Scene:
    """A user's home and sources, and a store with a planted library to put where one likes."""

    def __init__(self, public: Path, python: str, forged: Path) -> None:
        self.python, self.public, self.forged = python, public, forged
        self.home = public / "home"
        (self.home / ".cache").mkdir(parents=True)
        known.make_store(self.home / ".cache" / "opkiln")
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, USER, USER)
        self.source = write(public / "src" / "op.cpp", returning(GOOD))

    def environment(self, cache: Path | None) -> dict[str, str | None]:
        return {
            "HOME": str(self.home), "XDG_CACHE_HOME": None, "OPKILN_TMPDIR": "/var/tmp",
            "OPKILN_RUNTIME_DIR": str(self.home / "run"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPKILN_CACHE_DIR": None if cache is None else str(cache),
        }  # fmt: skip

    def plant(self, directory: Path, owner: int, mode: int, *, inside: int | None = None) -> Path:
        """A store with the planted library; ``inside`` owns what is in it."""
        directory.mkdir()
        shutil.copytree(self.forged / "v1", directory / "v1")
        for path in directory.rglob("*"):
            os.chown(path, owner if inside is None else inside, owner)
            os.chmod(path, 0o755)
        os.chown(directory, owner, owner)
        os.chmod(directory, mode)
        return directory

    def load(self, cache: Path | None, **more: str | None) -> Answer:
        env = {**self.environment(cache), **more}
        with Loader(env, python=self.python, user=USER) as process:
            return process.load("op", self.source)


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a library that was put in the place of another."""
    place = tmp_path_factory.mktemp("forged")
    made = known.make_store(place / "store")
    environment = {"OPKILN_CACHE_DIR": str(made), "OPKILN_RUNTIME_DIR": str(place / "run")}
    with Loader(environment) as process:
        assert process.load("op", write(place / "op.cpp", returning(GOOD))).value == GOOD
    (leaf,) = leaves(made)
    evil = write(place / "evil.cpp", returning(PLANTED))
    subprocess.run(["g++", "-shared", "-fPIC", str(evil), "-o", str(leaf / "op.so")], check=True)
    manifest = parse_manifest((leaf / "manifest.json").read_bytes())
    manifest["sha256"] = sha256_file(str(leaf / "op.so"))
    manifest["size"] = (leaf / "op.so").stat().st_size
    (leaf / "manifest.json").write_bytes(write_manifest(manifest))
    return made


@pytest.fixture
def scene(public: Path, python_of_others: str, forged: Path) -> Scene:
    return Scene(public, python_of_others, forged)


def of_another(scene: Scene, place: Path) -> Path:
    return scene.plant(place, OTHER, 0o755)


def own_and_writable_by_all(scene: Scene, place: Path) -> Path:
    return scene.plant(place, USER, 0o777)


def sticky_as_tmp(scene: Scene, place: Path) -> Path:
    return scene.plant(place, 0, 0o1777, inside=OTHER)


def own_link_to_anothers(scene: Scene, place: Path) -> Path:
    place.symlink_to(scene.plant(place.with_name("behind"), OTHER, 0o755))
    os.chown(place, USER, USER, follow_symlinks=False)
    return place


def anothers_link_to_own(scene: Scene, place: Path) -> Path:
    place.symlink_to(scene.plant(place.with_name("behind"), USER, 0o700))
    os.chown(place, OTHER, OTHER, follow_symlinks=False)
    return place


def own_with_anothers_store_in_it(scene: Scene, place: Path) -> Path:
    return scene.plant(place, USER, 0o700, inside=OTHER)


def roots_group_writable(scene: Scene, place: Path) -> Path:
    return scene.plant(place, 0, 0o775)


CASES = (
    of_another, own_and_writable_by_all, sticky_as_tmp, own_link_to_anothers, anothers_link_to_own,
    own_with_anothers_store_in_it, roots_group_writable,
)  # fmt: skip
# unit/test_location.py has the decision on these.
DECIDED = (own_and_writable_by_all, sticky_as_tmp, anothers_link_to_own, roots_group_writable)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.full if case in DECIDED else []) for case in CASES],
    ids=lambda case: case.__name__,
)
def test_a_planted_library_is_not_loaded_and_a_private_directory_is_used(
    case: Callable[[Scene, Path], Path], scene: Scene
) -> None:
    directory = case(scene, scene.public / "store")
    answer = scene.load(directory)
    assert answer.value == GOOD, answer
    said = " ".join(answer.warnings)
    refused = (directory, directory.resolve())  # through a link of one's own: where it leads
    assert any(f"{path} cannot be the store" in said for path in refused) or (
        f"{directory}/v1" in said
    )
    # What is used instead is named, and is for this user alone.
    store = Path(str(answer.path).split("/v1/")[0])
    assert f"the store is {store}" in said
    found = store.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (USER, 0o700)
    assert scene.load(directory).origin == "store"


def test_an_entry_of_another_in_ones_own_store_is_not_loaded(scene: Scene) -> None:
    directory = scene.plant(scene.public / "store", USER, 0o700)
    (leaf,) = leaves(directory)
    for path in (leaf, *leaf.iterdir()):
        os.chown(path, OTHER, OTHER)
    answer = scene.load(directory)
    assert answer.value == GOOD, answer
    assert any(f"uid {OTHER}" in reason for reason in answer.refused)


def test_the_planted_library_would_be_loaded_from_a_directory_of_ones_own(scene: Scene) -> None:
    """Which shows that nothing but owners and modes keeps it out in the cases above."""
    answer = scene.load(scene.plant(scene.public / "store", USER, 0o700))
    assert (answer.value, answer.origin) == (PLANTED, "store")


def test_roots_store_that_only_root_can_write_to_is_accepted(scene: Scene) -> None:
    answer = scene.load(scene.plant(scene.public / "store", 0, 0o755))
    assert (answer.value, answer.origin) == (PLANTED, "store")


def test_a_listed_layer_is_accepted_whoever_owns_it(scene: Scene) -> None:
    layer = scene.plant(scene.public / "store", OTHER, 0o755)
    answer = scene.load(None, OPKILN_STORE_LAYERS=str(layer))
    assert (answer.value, answer.origin) == (PLANTED, "layer")


@pytest.mark.parametrize(
    "part", [*(pytest.param(part, marks=pytest.mark.full) for part in ("", "v1")), "v1/ops"]
)
def test_a_listed_layer_that_everybody_can_write_to_is_not(scene: Scene, part: str) -> None:
    layer = scene.plant(scene.public / "store", 0, 0o755)
    (layer / part).chmod(0o777)
    answer = scene.load(None, OPKILN_STORE_LAYERS=str(layer))
    assert answer.value == GOOD, answer
    assert any("writable by everybody" in reason for reason in answer.refused)
