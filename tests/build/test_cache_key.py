"""``opkiln cache key``: it changes with what a build depends on, and with nothing else."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from sample.levels import LOW
from sample.package import rest

from opkiln.errors import ToolchainError
from opkiln.machine.toolchain import host
from opkiln.ship import prebuild, selection
from opkiln.ship.prebuild import KEY_PREFIX, cache_key

if TYPE_CHECKING:
    from pathlib import Path

    from sample.package import Package, Steps

pytestmark = pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")


def key_of(package: Package, target: str = "", **attributes: object) -> str:
    wanted = selection.parse(target)[0] if target else None
    return cache_key([prebuild.BuildRequest(package.builder(**attributes), wanted)])


@pytest.mark.timed
def test_the_key_is_the_same_until_something_that_matters_changes(
    plain: Package, steps: Steps, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key_of(plain)
    assert first.startswith(KEY_PREFIX)
    assert key_of(plain) == first
    (plain / "notes.py").write_text("x = 1")
    (plain / "csrc" / "big.bin").write_bytes(bytes(17 << 20))
    for path in plain.files():
        path.touch()
    rest()
    assert key_of(plain) == first, "neither Python, nor data, nor times"
    seen = {first, key_of(plain, FLAGS=("-DMORE",)), key_of(plain, f"cpu:{LOW}")}
    monkeypatch.setenv("OPKILN_CXXFLAGS", "-O1")
    seen.add(key_of(plain))
    monkeypatch.delenv("OPKILN_CXXFLAGS")
    header = next((plain / "csrc" / "include").rglob("*.h"))
    header.write_text(header.read_text() + "\n// edited\n")
    seen.add(key_of(plain))
    (plain / "csrc" / "first" / "new.h").write_text("// a header that may come first\n")
    seen.add(key_of(plain))
    assert len(seen) == 6
    assert steps.seen == [], "nothing is built"
    assert not (cache / "v1" / "ops").exists()


def test_the_key_does_not_depend_on_where_the_package_is(
    plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key_of(plain)
    shutil.copytree(plain.path, tmp_path / "elsewhere" / plain.name)
    builder = plain.builder()
    builder.root = str(tmp_path / "elsewhere" / plain.name)
    assert cache_key([prebuild.BuildRequest(builder)]) == first


def test_a_machine_without_a_compiler_has_no_key(
    plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError):
        key_of(plain)
