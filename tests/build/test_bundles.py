"""Bundles of real ops: taken into a store, or read where they lie, on machines of all kinds."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from sample import child, command, known, pool
from sample.compiler import Compiler
from sample.levels import LEVELS
from sample.package import settle
from sample.shipped import build

from opkiln.settings import override
from opkiln.store import inventory, layer, sealed, signing
from opkiln.store.bundle import unpack, write_bundle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package, Steps


class Shipped:
    """A package whose op is built elsewhere and comes here as one file."""

    def __init__(self, package: Package, base: Path) -> None:
        self.package = package
        self.elsewhere = known.make_store(base / "elsewhere")
        self.here = known.make_store(base / "here")
        self.file = base / "ops.bundle"

    def build(self, *settings: dict[str, Any]) -> None:
        """Build elsewhere, with each of these settings, and bundle what is there."""
        for each in settings or ({},):
            with override(cache_dir=str(self.elsewhere), **each):
                self.package.load()
        self.bundle()

    def bundle(self) -> None:
        found = inventory.entries(str(self.elsewhere / "v1"))
        payloads = [each.payload for each in found if each.kind == inventory.OP]
        stage = self.file.with_suffix(".layer")
        layer.export(payloads, str(stage))
        write_bundle(str(stage), str(self.file))
        pool.add(self.elsewhere)

    def load(self, **settings: Any) -> Any:
        with override(cache_dir=str(self.here), **settings):
            return self.package.load()

    def take(self) -> None:
        unpack(str(self.file), str(self.here / "v1"))

    def served_from(self) -> str:
        artifact = self.package.loaded().artifact
        assert artifact is not None
        return artifact.path

    def trace(self) -> str:
        return str(self.package.loaded().trace)


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    """The same sources give the same library, which this process may have in memory already."""
    sealed._kept.clear()


@pytest.fixture
def shipped(plain: Package, tmp_path: Path) -> Shipped:
    settle(*plain.files())
    return Shipped(plain, tmp_path)


def test_an_imported_entry_serves_beside_another_compiler(
    shipped: Shipped, tmp_path: Path, steps: Steps
) -> None:
    other = Compiler(tmp_path)
    other.write(version="g++ (Elsewhere) 99.1")
    shipped.build({"cxx": (str(other.path),)})
    shipped.take()
    done = len(steps.seen)
    assert shipped.load().add(1, 2) == 103
    assert shipped.served_from().startswith(str(shipped.here))
    assert len(steps.seen) == done


def test_an_imported_entry_serves_without_a_compiler_until_its_sources_are_others(
    shipped: Shipped, tmp_path: Path
) -> None:
    shipped.build()
    shipped.take()
    assert shipped.load(path=(str(tmp_path),)).add(1, 2) == 103
    assert shipped.served_from().startswith(str(shipped.here))
    shipped.package.edit("csrc/add.cpp", "a + b", "a - b")
    assert shipped.load().add(1, 2) == 99
    assert "csrc/add.cpp changed" in shipped.trace()


def test_of_several_cpu_levels_in_a_bundle_the_best_that_runs_here_serves(
    shipped: Shipped,
) -> None:
    shipped.build({"cpu": LEVELS[1]}, {"cpu": LEVELS[2]})
    shipped.take()
    assert shipped.load().add(1, 2) == 103
    assert f"its code for {LEVELS[2]} runs here" in shipped.trace()


def test_a_bundle_is_a_layer_beside_directories_that_nothing_is_written_for(
    shipped: Shipped, tmp_path: Path, steps: Steps
) -> None:
    shipped.build()
    empty = tmp_path / "empty"
    empty.mkdir()
    layers = (str(empty), str(shipped.file))
    done, before = len(steps.seen), sorted(os.walk(shipped.here))
    assert shipped.load(store_layers=layers).add(1, 2) == 103
    assert shipped.served_from().startswith("/proc/")
    assert len(steps.seen) == done
    assert sorted(os.walk(shipped.here)) == before
    assert f"{shipped.file}!v1/ops/" in shipped.trace()
    # It can be edited and reloaded.
    shipped.package.edit("csrc/add.cpp", "a + b", "a - b")
    assert shipped.load(store_layers=layers).add(1, 2) == 99
    shipped.package.edit("csrc/add.cpp", "a - b", "a + b")
    assert shipped.load(store_layers=layers).add(1, 2) == 103


def test_a_damaged_bundle_is_passed_over_and_the_op_is_built(shipped: Shipped) -> None:
    shipped.build()
    data = bytearray(shipped.file.read_bytes())
    data[len(data) // 2] ^= 1
    shipped.file.write_bytes(data)
    assert shipped.load(store_layers=(str(shipped.file),)).add(1, 2) == 103
    assert shipped.served_from().startswith(str(shipped.here))
    assert "has the SHA-256" in shipped.trace()


def test_where_keys_are_configured_a_layer_serves_once_it_is_signed(
    shipped: Shipped, tmp_path: Path
) -> None:
    key = signing.generate(str(tmp_path / "key"))
    asked = {"store_layers": (str(shipped.file),), "trusted_keys": (key.key,)}
    shipped.build()
    assert shipped.load(**asked).add(1, 2) == 103
    assert shipped.served_from().startswith(str(shipped.here))  # it was built
    assert f"{shipped.file} is refused: it is not signed" in shipped.trace()
    shutil.rmtree(shipped.here)
    signing.sign(str(shipped.file), key.private)
    assert shipped.load(**asked).add(1, 2) == 103
    assert shipped.served_from().startswith("/proc/")


def test_a_hit_does_not_ask_for_keys_of_bundles(plain: Package, tmp_path: Path) -> None:
    key = signing.generate(str(tmp_path / "key"))
    settle(*plain.files())
    code = """
        import importlib, sys
        print(importlib.import_module(sys.argv[1] + ".op").PlainBuilder().load().add(1, 2))
        print("cryptography" in sys.modules)
    """
    environment = {"OPKILN_TRUSTED_KEYS": key.key}
    for _ in range(2):
        out = child.run(code, plain.name, path=[plain.where], env=environment, bare=False)
        assert out == "103\nFalse\n"


def test_a_torch_op_is_served_from_a_bundle_and_reloaded_beside_it(
    package: Callable[..., Package], tmp_path: Path
) -> None:
    """torch opens what a path leads to, and there is no such file; nor is there one for the child
    that tries a new version beside the old."""
    stable = package("stable")
    settle(*stable.files())
    shipped = Shipped(stable, tmp_path)
    shipped.build()
    code = """
        import importlib, sys, torch
        from opkiln.loading import loader
        builder = importlib.import_module(sys.argv[1] + ".op").StableBuilder()
        functions = builder.load()
        loaded = [each for each, _ in loader.loaded_here().values()]
        print(functions.who(torch.ones(2)), *(each.artifact.path for each in loaded))
        with open(sys.argv[2], "a") as file:
            file.write("int edited() { return 1; }")
        print(builder.load(reload=True).who(torch.ones(2)),
              *(l.artifact.origin for l, _ in loader.loaded_here().values()))
    """
    source = stable.path / "csrc" / "stable.cpp"
    environment = {
        "OPKILN_CACHE_DIR": str(shipped.here),
        "OPKILN_STORE_LAYERS": f"{shipped.file}{os.pathsep}{pool.LAYER}",
        "OPKILN_MODE": "native",
    }
    arguments = (stable.name, str(source))
    out = child.run(code, *arguments, path=[stable.where], env=environment, bare=False)
    pool.add(shipped.here)
    first, second = out.splitlines()
    assert first.split()[0] == second.split()[0] != "0"
    assert first.split()[1].startswith("/proc/")
    assert second.split()[1] == "built"


# The commands


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a bundled op in it."""
    directory = tmp_path_factory.mktemp("store") / "cache"
    build(directory, "cpu_adam")
    return directory


def test_export_and_import_carry_an_op_to_another_store(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ops.bundle"
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(store))
    exported = command.run("cache", "export", str(file), "--json")
    assert exported.returncode == 0, exported.stderr
    written = json.loads(exported.stdout)
    assert written["entries"] == 1
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(tmp_path / "other"))
    imported = command.run("cache", "import", str(file), "--sha256", written["sha256"], "--json")
    assert imported.returncode == 0, imported.stderr
    (entry,) = json.loads(imported.stdout)["entries"]
    assert (entry["op"], entry["distribution"], entry["new"]) == ("cpu_adam", "opkiln", True)
    assert "already there" in command.run("cache", "import", str(file)).stdout
    done = command.run("check", "cpu_adam", OPKILN_CACHE_DIR=str(tmp_path / "other"))
    assert (done.returncode, "cached" in done.stdout) == (0, True), done.stdout
    again = tmp_path / "again.bundle"
    assert command.run("cache", "export", str(again)).returncode == 0
    assert again.read_bytes() == file.read_bytes()


def test_an_op_that_the_store_lacks_cannot_be_exported(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(store))
    done = command.run(
        "cache", "export", str(tmp_path / "file"), "--op", "cpu_adam", "--op", "no_such_op"
    )
    assert (done.returncode, "no entry of no_such_op" in done.stderr) == (5, True)
    assert not (tmp_path / "file").exists()
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(tmp_path / "empty"))
    assert "no entries" in command.run("cache", "export", str(tmp_path / "file")).stderr


def test_a_digest_that_is_none_is_a_wrong_call(tmp_path: Path) -> None:
    done = command.run("cache", "import", str(tmp_path), "--sha256", "abc")
    assert done.returncode == 2


def test_verify_checks_every_byte_of_a_listed_bundle(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ops.bundle"
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(store))
    assert command.run("cache", "export", str(file)).returncode == 0
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("OPKILN_STORE_LAYERS", str(file))
    whole = command.run("cache", "verify")
    assert (whole.returncode, "1 entry checked" in whole.stdout) == (0, True)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    harmed = command.run("cache", "verify")
    assert (harmed.returncode, str(file) in harmed.stdout) == (5, True)
    monkeypatch.delenv("OPKILN_STORE_LAYERS")
    given = command.run("cache", "verify", str(file))
    assert (given.returncode, given.stdout) == (harmed.returncode, harmed.stdout)


def test_what_a_listed_bundle_has_counts_as_built(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ops.bundle"
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(store))
    assert command.run("cache", "export", str(file)).returncode == 0
    environment = {
        "OPKILN_CACHE_DIR": str(tmp_path / "empty"),
        "OPKILN_STORE_LAYERS": str(file),
        "OPKILN_MODE": "cached",
    }
    done = command.run("build", "cpu_adam", "--json", **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ops"][0]["status"] == "cached"
    refused = command.run("build", "cpu_adam", "--out", str(tmp_path / "out"), **environment)
    assert refused.returncode == 5
    assert "OPKILN_STORE_LAYERS" in refused.stderr
