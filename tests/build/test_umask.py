"""A umask that takes files away from their owner: loads, builds and reports work all the same."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from sample import child

from opkiln.base.trust import make_private, usable_by_owner
from opkiln.machine.toolchain import host

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD = """
    import os, sys, opkiln
    os.umask(int(sys.argv[2], 8))
    library = opkiln.load("op", [sys.argv[1]], is_python_module=False, abi="none")
    print(library.value(), oct(os.umask(0)))
"""
COMMAND = """
    import os, sys
    os.umask(0o777)
    from opkiln.cli.main import main
    sys.argv = ["opkiln", *sys.argv[1:]]
    main()
"""


@pytest.fixture
def user() -> int | None:
    """Somebody whom modes bind: not root."""
    return child.NOBODY if os.getuid() == 0 else None


@pytest.fixture
def place(user: int | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of that user. pytest's own are closed to others."""
    made = Path(tempfile.mkdtemp(prefix="opkiln-umask-", dir="/var/tmp"))
    (made / "op.cpp").write_text('extern "C" int value() { return 7; }\n')
    (made / "op.cpp").chmod(0o644)
    for path in (made, made / "op.cpp"):
        os.chown(path, os.getuid() if user is None else user, -1)
    names = {"HOME": "home", "OPKILN_CACHE_DIR": "cache", "OPKILN_RUNTIME_DIR": "run"}
    for name, below in {**names, "OPKILN_TMPDIR": "."}.items():
        monkeypatch.setenv(name, str(made / below))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    yield made
    for directory in (made, *made.rglob("*")):
        if directory.is_dir():
            directory.chmod(0o700)
    shutil.rmtree(made)


def modes(place: Path) -> Iterator[tuple[Path, int]]:
    for path in place.rglob("*"):
        yield path, stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")
@pytest.mark.parametrize("umask", ["777", pytest.param("700", marks=pytest.mark.full), "277"])
def test_a_build_and_a_hit_work_and_leave_the_umask_as_it_was(
    place: Path, user: int | None, umask: str
) -> None:
    python = child.python_for(child.NOBODY if user is None else user)
    if python is None:
        pytest.skip("no interpreter that another user can start")
    for _ in range(2):
        said = child.run(LOAD, str(place / "op.cpp"), umask, user=user, python=python)
        assert said == f"7 {int(umask, 8):#o}\n"
    unusable = [path for path, mode in modes(place) if mode & 0o400 != 0o400]
    assert unusable == []
    assert [path for path, mode in modes(place / "cache") if mode & 0o077 & int(umask, 8)] == []


@pytest.mark.parametrize("command", [["report"], ["cache", "list"]])
def test_commands_work(place: Path, user: int | None, command: list[str]) -> None:
    packages = Path(click.__file__).parent.parent
    python = child.python_for(child.NOBODY if user is None else user)
    if python is None or not packages.stat().st_mode & 0o005:
        pytest.skip("no interpreter with click that another user can start")
    done = child.finish(child.start(COMMAND, *command, path=[packages], user=user, python=python))
    assert done.returncode == 0, done.stderr
    assert [path for path, mode in modes(place) if mode & 0o400 != 0o400] == []


def test_a_directory_that_is_made_for_the_store_is_its_owner_s(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        make_private(str(tmp_path / "a" / "b"))
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.timed
def test_the_umask_comes_back_after_the_last_of_several_blocks(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with usable_by_owner():
            entered.set()
            leave.wait(30)

    before = os.umask(0o737)
    try:
        other = threading.Thread(target=stay)
        with usable_by_owner():
            other.start()
            assert entered.wait(30)
        (tmp_path / "within").touch()
        leave.set()
        other.join(30)
        assert os.umask(0o737) == 0o737
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "within").stat().st_mode) == 0o640
