"""Read-only layers below the user's own store: wheels, images, shared file systems."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from sample import known, wanted
from sample.compiler import Compiler
from sample.levels import LEVELS, kernel_flags, lacks
from sample.package import put, settle

from opkiln.decision.archs import features
from opkiln.errors import StoreWarning
from opkiln.machine import uname
from opkiln.machine.arch import cpu
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path

    from sample.package import Package, Steps


class Layered:
    """A layer that was built elsewhere, below a store of one's own that is empty."""

    def __init__(self, package: Package, base: Path) -> None:
        self.package = package
        self.layer = known.make_store(base / "layer")
        self.own = known.make_store(base / "own")

    def build(self, **settings: Any) -> None:
        """Fill the layer."""
        with override(cache_dir=str(self.layer), **settings):
            self.package.load()

    def load(self, **settings: Any) -> Any:
        """Load with the layer listed."""
        with override(cache_dir=str(self.own), store_layers=(str(self.layer),), **settings):
            return self.package.load()

    def served_from(self) -> str:
        artifact = self.package.loaded().artifact
        assert artifact is not None
        return artifact.path

    def trace(self) -> str:
        return str(self.package.loaded().trace)


@pytest.fixture
def layered(plain: Package, tmp_path: Path) -> Layered:
    settle(*plain.files())
    return Layered(plain, tmp_path)


def test_a_listed_layer_serves_and_nothing_is_written(layered: Layered, steps: Steps) -> None:
    layered.build()
    before = sorted(os.walk(layered.layer))
    done = len(steps.seen)
    assert layered.load().add(1, 2) == 103
    assert layered.served_from().startswith(str(layered.layer))
    assert len(steps.seen) == done
    assert sorted(os.walk(layered.layer)) == before
    assert not list(layered.own.glob("v1/ops/**/*.so"))


def test_a_layer_built_by_another_compiler_serves(
    layered: Layered, tmp_path: Path, steps: Steps
) -> None:
    other = Compiler(tmp_path)
    other.write(version="g++ (Elsewhere) 99.1")
    layered.build(cxx=(str(other.path),))
    done = len(steps.seen)
    assert layered.load().add(1, 2) == 103
    assert layered.served_from().startswith(str(layered.layer))
    assert len(steps.seen) == done


def test_a_layer_serves_where_there_is_no_compiler(layered: Layered, tmp_path: Path) -> None:
    layered.build()
    assert layered.load(path=(str(tmp_path),)).add(1, 2) == 103
    assert layered.served_from().startswith(str(layered.layer))


def test_ones_own_store_comes_first(layered: Layered) -> None:
    layered.build()
    with override(cache_dir=str(layered.own)):
        layered.package.load()
    layered.load()
    assert layered.served_from().startswith(str(layered.own))


def test_a_layer_of_other_sources_does_not_serve(layered: Layered, steps: Steps) -> None:
    layered.build()
    layered.package.edit("csrc/add.cpp", "a + b", "a - b")
    assert layered.load().add(1, 2) == 99
    assert layered.served_from().startswith(str(layered.own))
    assert "csrc/add.cpp changed" in layered.trace()
    # Its objects do serve: they are the same compiles.
    assert steps.compiled[-4:].count("csrc/scale.cpp") == 1


def test_a_damaged_entry_of_a_layer_is_refused_and_left_alone(layered: Layered) -> None:
    layered.build()
    (library,) = layered.layer.glob("v1/ops/*/*/*/*/*/plain.so")
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    put(library, bytes(data))
    assert layered.load().add(1, 2) == 103
    assert layered.served_from().startswith(str(layered.own))
    assert "wrong digest" in layered.trace()
    assert library.read_bytes() == bytes(data)


def test_a_layer_that_everybody_can_write_to_is_refused(layered: Layered) -> None:
    layered.build()
    (library,) = layered.layer.glob("v1/ops/*/*/*/*/*/plain.so")
    library.chmod(0o777)
    layered.load()
    assert layered.served_from().startswith(str(layered.own))
    assert "writable by everybody" in layered.trace()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_layer_of_another_user_serves_because_it_is_listed_and_only_then(
    layered: Layered,
) -> None:
    layered.build()
    for directory, names, files in os.walk(layered.layer):
        for name in (*names, *files):
            os.chown(os.path.join(directory, name), 65534, 65534)
    layered.load()
    assert layered.served_from().startswith(str(layered.layer))
    shutil.rmtree(layered.own, ignore_errors=True)
    with (
        override(cache_dir=str(layered.layer)),
        pytest.warns(StoreWarning, match="belongs to uid 65534"),
    ):
        layered.package.load()
    assert layered.served_from().startswith(str(layered.layer / "opkiln-"))


def test_a_layer_that_everybody_can_write_to_is_refused_though_it_is_listed(
    layered: Layered,
) -> None:
    layered.build()
    layered.layer.chmod(0o1777)
    layered.load()
    assert "is writable by everybody" in layered.trace()
    assert layered.served_from().startswith(str(layered.own))


def test_several_layers_are_tried_in_order(layered: Layered, tmp_path: Path) -> None:
    layered.build()
    empty = tmp_path / "empty"
    with override(cache_dir=str(layered.own), store_layers=(str(empty), str(layered.layer))):
        layered.package.load()
    assert layered.served_from().startswith(str(layered.layer))


def test_a_lower_cpu_level_in_a_layer_serves_this_cpu(layered: Layered, steps: Steps) -> None:
    if cpu.missing_features(LEVELS[2], (), features()):
        pytest.skip(f"this CPU is older than {LEVELS[2]}")
    layered.build(cpu=LEVELS[2])
    done = len(steps.seen)
    assert layered.load().add(1, 2) == 103
    assert layered.served_from().startswith(str(layered.layer))
    assert len(steps.seen) == done


def test_a_lower_level_does_not_serve_who_asks_for_another_by_name(layered: Layered) -> None:
    layered.build(cpu=LEVELS[1])
    layered.load(cpu=LEVELS[2])
    assert layered.served_from().startswith(str(layered.own))


def test_an_entry_for_a_better_cpu_is_refused_naming_what_this_one_lacks(
    layered: Layered, monkeypatch: pytest.MonkeyPatch
) -> None:
    layered.build(cpu=LEVELS[2])
    # Moved under the name that an older CPU asks for, as a careless copy of a store would.
    (entry,) = layered.layer.glob("v1/ops/*/plain/*")
    monkeypatch.setattr(uname, "cpu_flags", lambda: kernel_flags(LEVELS[1]))
    from opkiln.store import key

    op = layered.package.builder().op()
    asked = key.intent_key(op.spec, wanted.target_of(op))
    os.rename(entry, entry.with_name(asked))
    layered.load()
    assert layered.served_from().startswith(str(layered.own))
    assert f"needs {lacks(LEVELS[1], than=LEVELS[2])}, which this CPU lacks" in layered.trace()
