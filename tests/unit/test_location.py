"""Where the store is, for every kind of directory it may be given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from opkiln.base.trust import make_private
from opkiln.store import layers
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UID = os.getuid()
as_root = pytest.mark.skipif(UID != 0, reason="only root can give files away")


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., layers.Location]:
    """Chooses for a HOME and a TMPDIR below tmp_path."""
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def chosen(cache: Path | None = None, **variables: str | None) -> layers.Location:
        if cache is None:
            monkeypatch.delenv("OPKILN_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("OPKILN_CACHE_DIR", str(cache))
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        return layers.choose()

    return chosen


def everything(base: Path) -> list[Path]:
    return sorted(base.rglob("*"))


def test_choosing_makes_nothing(choose: Callable[..., layers.Location], tmp_path: Path) -> None:
    before = everything(tmp_path)
    choose()
    choose(tmp_path / "asked")
    assert everything(tmp_path) == before


def test_a_directory_that_is_not_there_yet_can_be_the_store(
    choose: Callable[..., layers.Location], tmp_path: Path
) -> None:
    found = choose(tmp_path / "a" / "b")
    assert found.writable == str(tmp_path / "a" / "b" / layers.LAYOUT)
    assert found.notes == ()
    # What another process publishes there from now on is found, too.
    assert [layer.root for layer in found.layers] == [found.writable]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/opkiln"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/opkiln"),
        ({"XDG_CACHE_HOME": "relative"}, f"tmp/opkiln-{UID}"),
    ],
)
def test_the_default_is_the_users_cache_directory(
    choose: Callable[..., layers.Location],
    tmp_path: Path,
    variables: dict[str, str],
    expected: str,
) -> None:
    found = choose(**{name: value.format(tmp_path) for name, value in variables.items()})
    assert found.writable == str(tmp_path / expected / layers.LAYOUT)
    assert found.notes == ()


def test_without_home_and_passwd_entry_the_temporary_directory_serves(
    choose: Callable[..., layers.Location], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for such a user
    found = choose(HOME=None)
    assert found.writable == str(tmp_path / "tmp" / f"opkiln-{UID}" / layers.LAYOUT)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_directory_that_others_can_write_to_gets_a_private_one_inside(
    choose: Callable[..., layers.Location], tmp_path: Path, mode: int
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    found = choose(shared)
    assert found.writable == str(shared / f"opkiln-{UID}" / layers.LAYOUT)
    assert [layer.root for layer in found.layers] == [found.writable]
    assert "writable by others" in found.notes[0]
    assert found.notes[-1] == f"the store is {shared}/opkiln-{UID}"


@as_root
def test_a_directory_of_somebody_else_is_not_used(
    choose: Callable[..., layers.Location], tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    os.chown(foreign, 65534, 65534)
    found = choose(foreign)
    assert str(foreign / layers.LAYOUT) not in [layer.root for layer in found.layers]
    assert "belongs to uid 65534" in found.notes[0]


def test_a_planted_private_directory_is_not_used_either(
    choose: Callable[..., layers.Location], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (shared / f"opkiln-{UID}").mkdir(parents=True)
    shared.chmod(0o777)
    (shared / f"opkiln-{UID}").chmod(0o777)
    found = choose(shared)
    assert found.writable == str(tmp_path / "home" / ".cache" / "opkiln" / layers.LAYOUT)


def test_a_link_of_ones_own_leads_to_the_store(
    choose: Callable[..., layers.Location], tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(scratch)
    assert choose(tmp_path / "link") == choose(scratch)
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "opkiln").symlink_to(scratch / "not made yet")
    found = choose(None)
    assert (found.writable, found.notes) == (str(scratch / "not made yet" / layers.LAYOUT), ())


@as_root
def test_anothers_link_is_not_the_store_but_a_private_directory_behind_it_may_be(
    choose: Callable[..., layers.Location], tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    found = choose(tmp_path / "link")
    assert "symbolic link" in found.notes[0]
    assert found.writable == str(tmp_path / "link" / f"opkiln-{UID}" / layers.LAYOUT)
    assert [layer.root for layer in found.layers] == [found.writable]


def test_a_file_in_the_way_is_named(choose: Callable[..., layers.Location], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "not a directory" in choose(tmp_path / "file").notes[0]
    assert "not a directory" in choose(tmp_path / "file" / "below").notes[0].lower()


def test_a_read_only_store_serves_hits_and_another_takes_what_is_built(
    choose: Callable[..., layers.Location], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = tmp_path / "fixed"
    (fixed / "v1").mkdir(parents=True)
    allowed = os.access

    def access(path: str, mode: int) -> bool:
        # root may write everywhere; what a read-only mount answers is stated instead
        return not str(path).startswith(str(fixed)) and allowed(path, mode)

    monkeypatch.setattr(os, "access", access)
    found = choose(fixed)
    assert found.layers[0].root == str(fixed / "v1")
    assert found.writable == str(tmp_path / "home" / ".cache" / "opkiln" / "v1")
    assert any("read-only" in note for note in found.notes)


def test_listed_layers_come_last_and_are_marked_as_trusted(
    choose: Callable[..., layers.Location], tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    found = choose(tmp_path / "own", OPKILN_STORE_LAYERS=f"{tmp_path}/l1:{tmp_path}/l2")
    assert [(layer.root, layer.listed) for layer in found.layers] == [
        (f"{tmp_path}/own/v1", False),
        (f"{tmp_path}/l1/v1", True),
        (f"{tmp_path}/l2/v1", True),
    ]


def test_directories_are_made_for_the_user_alone(tmp_path: Path) -> None:
    make_private(str(tmp_path / "a" / "b"))
    make_private(str(tmp_path / "a" / "b"))
    assert [oct((tmp_path / name).stat().st_mode & 0o777) for name in ("a", "a/b")] == ["0o700"] * 2


def test_a_store_that_can_be_nowhere_still_answers(
    choose: Callable[..., layers.Location], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    store = Store(choose(tmp_path / "asked"))
    assert store.root is None
    assert store.memory == ()
