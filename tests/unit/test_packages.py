"""Which packages are installed, without importlib.metadata."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from opkiln.machine import packages

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    return tmp_path


def install(site: Path, name: str, text: str = "") -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if text:
        (info / "entry_points.txt").write_text(text)


def test_entry_points_of_a_group_are_found(site: Path) -> None:
    install(site, "plain")
    (site / "old-1.0.egg-info").write_text("a file, which has no entry points")
    assert packages.entry_points("opkiln.ops") == []
    install(site, "theirs", "[opkiln.ops]\nname = theirs.ops\n")
    assert [each.value for each in packages.entry_points("opkiln.ops")] == ["theirs.ops"]
    assert packages.entry_points("opkiln.accelerators") == []


def test_package_may_be_installed_in_any_spelling(site: Path) -> None:
    install(site, "intel_sycl")
    assert not packages.may_be_installed("intel-sycl-rt")
    install(site, "Intel_SYCL.rt")
    assert packages.may_be_installed("intel-sycl-rt")


def test_zip_on_the_path_may_contain_anything(site: Path) -> None:
    with zipfile.ZipFile(site / "app.zip", "w") as file:
        file.writestr("theirs-1.0.dist-info/METADATA", "Name: theirs\nVersion: 1.0\n")
        file.writestr("theirs-1.0.dist-info/entry_points.txt", "[opkiln.ops]\na = theirs\n")
    sys.path.append(str(site / "app.zip"))
    assert packages.may_be_installed("anything")
    assert [each.name for each in packages.entry_points("opkiln.ops")] == ["a"]


def test_report_of_bundled_ops_does_not_import_importlib_metadata() -> None:
    code = (
        "import sys; from opkiln.report import collect, forms; forms.as_text(collect.collect());"
        "print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
