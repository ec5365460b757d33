"""Row 18: builds and loads write to the store and to private scratch directories, nowhere else."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

import pytest
from loaders import Loader, leaves, returning, write
from sample import child
from sample.tracing import Call, calls, strace

pytestmark = pytest.mark.row(18)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a working directory and a /tmp of the test's own, all empty."""
    for name in ("home", "work", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "work")
    # Python's own: bytecode is nothing that opkiln writes.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return tmp_path / "home"


def place_of(call: Call) -> Path:
    """The absolute path that a call is about; relative ones are to a descriptor's directory."""
    within = re.match(r"(?:\d+|AT_FDCWD)<([^>]*)>, \"", call.arguments)
    base = within.group(1) if within else os.getcwd()
    return Path(os.path.normpath(os.path.join(base, call.path)))


def strays(log: Path, *allowed: Path) -> list[Call]:
    """Calls that wrote, or would have, to a place that is none of these."""
    ends = ("pipe:", "socket:", "anon_inode:", "/dev/null", "/dev/pts/", "/dev/tty", "/memfd:")
    found = []
    for call in calls(log):
        if not call.writes or call.path.startswith(ends) or call.arguments.startswith(("1<", "2<")):
            continue
        path = place_of(call)
        if not any(path == place or path.is_relative_to(place) for place in allowed):
            found.append(call)
    return found


def load_files(process: Loader, source: Path) -> None:
    assert process.load("op", source).origin == "built"
    assert process.load("op", source).origin == "store"


def test_loads_write_to_the_store_and_the_scratch_directory_alone(
    tmp_path: Path, cache: Path, scratch: Path, home: Path
) -> None:
    source = write(tmp_path / "src" / "op.cpp", returning(18))
    wrong = write(tmp_path / "src" / "wrong.cpp", returning("undeclared"))
    log = tmp_path / "log"
    with Loader(prefix=strace(log)) as process:
        load_files(process, source)
        (leaf,) = leaves(cache)
        (leaf / "op.so").unlink()
        (leaf / "op.so").write_bytes(b"")
        assert process.load("op", source).value == 18
        assert process.load("text", text=returning(19)).value == 19
        assert process.load("wrong", wrong).error == "CompileError"
    assert any(call.writes for call in calls(log))  # it saw the builds at all
    assert strays(log, cache, scratch, cache.parent / "run") == []
    for place in (home, tmp_path / "work", tmp_path / "tmp", scratch):
        assert list(place.iterdir()) == []


def test_by_default_only_the_users_cache_and_private_directories_are_written(
    tmp_path: Path, cache: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPKILN_CACHE_DIR")
    source = write(tmp_path / "src" / "op.cpp", returning(18))
    log = tmp_path / "log"
    with Loader(prefix=strace(log)) as process:
        load_files(process, source)
    made = [call for call in strays(log, home / ".cache", cache.parent / "run") if not call.failed]
    scratch = tmp_path / "tmp"
    assert [call for call in made if not place_of(call).is_relative_to(scratch)] == []
    # What is made there has a name that nobody can guess, and is for this user alone.
    for call in made:
        if call.name == "mkdir" and Path(call.path).parent == scratch:
            assert ", 0700" in call.arguments
    assert list(scratch.iterdir()) == []
    for path in (home / ".cache" / "opkiln").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


COMMANDS = """
import sys
from opkiln.cli.main import main
for command in ("report", "cache gc", "cache verify", "cache size"):
    sys.argv = ["opkiln", *command.split()]
    try:
        main()
    except SystemExit as ended:
        assert ended.code in (None, 0, 1), (command, ended.code)
    print("done:", command)
"""


def test_commands_write_to_the_store_alone(
    tmp_path: Path, cache: Path, scratch: Path, home: Path
) -> None:
    source = write(tmp_path / "src" / "op.cpp", returning(18))
    with Loader() as process:
        load_files(process, source)
    log = tmp_path / "log"
    assert child.run(COMMANDS, bare=False, prefix=strace(log)).count("done:") == 4
    assert strays(log, cache, scratch, cache.parent / "run") == []
    assert sys.executable in {call.path for call in calls(log) if call.name == "execve"}
