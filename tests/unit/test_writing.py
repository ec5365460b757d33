"""Files that are written in one step."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from opkiln.base import digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_file_and_the_directories_above_it_are_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "store" / "logs" / "op.log"
    digest.write_private(str(path), b"first")
    path.chmod(0o644)
    digest.write_private(str(path), b"second")
    assert path.read_bytes() == b"second"
    assert mode(path) == 0o600
    assert [mode(each) for each in path.parents[:2]] == [0o700, 0o700]


def test_file_that_is_replaced_keeps_its_mode_and_the_link_that_leads_to_it(tmp_path: Path) -> None:
    path, link = tmp_path / "real" / "page.html", tmp_path / "page.html"
    path.parent.mkdir()
    path.write_bytes(b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    digest.replace(str(link), b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert mode(path) == 0o640
    assert os.listdir(path.parent) == ["page.html"]


def test_new_file_has_the_mode_that_the_umask_allows(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    digest.replace(str(tmp_path / "new"), b"")
    assert mode(tmp_path / "new") == mode(tmp_path / "plain")


@pytest.mark.parametrize("write", [digest.replace, digest.write_private])
def test_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[str, bytes], None]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    seen = []

    def refuse(temporary: str, final: str) -> None:
        seen.append((temporary, final))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    [(temporary, final)] = seen
    assert digest.is_temporary(temporary)
    assert final == str(path)
    assert not digest.is_temporary(final)
