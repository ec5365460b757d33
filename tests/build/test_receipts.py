"""A receipt serves while all it rests on holds, and never beyond."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import pytest
from sample import at_rest

from opkiln.base import model
from opkiln.decision import receipt
from opkiln.decision.terms import Request

if TYPE_CHECKING:
    from pathlib import Path

    from sample.package import Package

pytestmark = pytest.mark.timed


@pytest.fixture
def built(plain: Package, monkeypatch: pytest.MonkeyPatch) -> Package:
    """An op whose files have come to rest, built, so that its receipt holds."""
    at_rest.shorten(monkeypatch)
    at_rest.wait(plain.path)
    plain.load()
    return plain


def recalled(package: Package) -> bool:
    return receipt.recall(Request(package.builder().op())) is not None


def test_a_build_leaves_a_receipt_that_serves(built: Package) -> None:
    assert recalled(built)


def test_an_edit_ends_it(built: Package) -> None:
    source = built / "csrc" / "add.cpp"
    source.write_text(source.read_text() + "\n")
    assert not recalled(built)


def test_a_new_compiler_first_on_the_path_ends_it(
    plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "bin"
    first.mkdir()
    monkeypatch.setenv("PATH", f"{first}:{os.environ['PATH']}")
    at_rest.shorten(monkeypatch)
    at_rest.wait(plain.path, first)
    plain.load()
    assert recalled(plain)
    (first / "g++").symlink_to("/usr/bin/g++")
    assert not recalled(plain)


def test_another_release_of_opkiln_does_not_believe_it(
    built: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipt, "PLAN_VERSION", model.PLAN_VERSION + 1)
    assert not recalled(built)


def test_a_store_that_others_may_write_to_is_not_served_from_by_receipt_either(
    built: Package, cache: Path
) -> None:
    cache.chmod(0o777)
    assert not recalled(built)
    cache.chmod(0o700)
    assert recalled(built)


def test_a_flag_in_the_environment_and_another_python_have_receipts_of_their_own(
    built: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "-DOTHER")
    assert not recalled(built)
    monkeypatch.delenv("CXXFLAGS")
    assert recalled(built)
    monkeypatch.setattr(sys, "version", "another")
    assert not recalled(built)


def test_a_file_that_is_saved_built_and_loaded_within_a_second_keeps_the_fast_path(
    plain: Package,
) -> None:
    quick = 0
    for number in range(3):
        source = plain / "csrc" / "add.cpp"
        source.write_text(source.read_text() + f"// {number}\n")
        assert not recalled(plain)
        plain.load()
        assert recalled(plain), number
        quick += time.time() - source.stat().st_mtime < 2
    if not quick:
        pytest.skip("this machine is too busy: each build took more than two seconds")


def test_a_header_that_shadows_another_ends_it(built: Package) -> None:
    (built / "csrc" / "shared.h").write_text("#error this one is read first")
    assert not recalled(built)


def test_another_path_that_leads_to_the_same_compiler_has_the_same_receipt(
    built: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activated = tmp_path / "venv" / "bin"
    activated.mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{activated}:{os.environ['PATH']}:/opt/more/bin")
    assert recalled(built)


def test_a_full_search_that_ends_in_a_hit_leaves_a_fresh_receipt(
    built: Package, cache: Path
) -> None:
    (found,) = cache.glob("v1/receipts/*/*/*.json")
    found.unlink()
    assert not recalled(built)
    built.load()
    assert recalled(built)


def test_a_hit_by_receipt_writes_nothing(built: Package, cache: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = (path for path in cache.rglob("*"))
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}

    before = state()
    built.load()
    assert state() == before
