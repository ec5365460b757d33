"""What would end in an error of Python's own is a clear error of opkiln's."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample import child

import opkiln
from opkiln import settings
from opkiln.base.model import OpSpec
from opkiln.errors import OpkilnError, SettingError, SpecError, UsageError
from opkiln.plan.plan import check
from opkiln.run import process
from opkiln.run.chrome import ChromeTrace
from opkiln.store import publish

HIGH = "\ud800"  # stands for no byte


def load(*sources: str, **more: Any) -> Any:
    return opkiln.load("op", sources, is_python_module=False, abi="none", verbose=False, **more)


@pytest.mark.parametrize("second", ["op.cpp", "./op.cpp", "x/../op.cpp"])
def test_a_source_that_is_listed_twice_is_named(second: str, tmp_path: Path) -> None:
    (tmp_path / "op.cpp").touch()
    with pytest.raises(SpecError, match=r"the source .*op\.cpp is listed twice"):
        load(f"{tmp_path}/op.cpp", f"{tmp_path}/{second}")
    with pytest.raises(SpecError, match=r"the source op\.cpp is listed twice"):
        check(OpSpec("op", "somebody", "/", ("op.cpp", second)))


LOST = """
import os, sys
os.mkdir("lost"); os.chdir("lost"); os.rmdir("../lost")
import opkiln
from opkiln.errors import UsageError
try:
    opkiln.load("op", [sys.argv[1]], is_python_module=False, abi="none", verbose=False)
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize(("source", "store"), [("op.cpp", "/tmp/x"), ("/nowhere/op.cpp", "x")])
def test_a_removed_working_directory_is_told(
    source: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if source.startswith("/"):
        (tmp_path / "op.cpp").write_text("int value;")
        source = str(tmp_path / "op.cpp")
    said = child.run(LOST, source, env={"OPKILN_CACHE_DIR": store})
    assert said.startswith("the working directory does not exist any more\n"), said
    assert "hint: cd " in said


def test_a_command_tells_of_a_removed_working_directory(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    lost.mkdir()
    line = 'rmdir "$PWD"; exec "$0" -P -m opkiln cache list'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], cwd=lost, capture_output=True, text=True, check=False,
        env={**os.environ, "OPKILN_CACHE_DIR": "relative", "PYTHONPATH": str(child.SOURCE)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "error: the working directory does not exist any more" in done.stderr


def surrogates(where: Path) -> dict[str, Any]:
    source = where / "op.cpp"
    source.write_text("int value;")
    text = f"int value; // {HIGH}"
    more: dict[str, Any] = {"is_python_module": False, "abi": "none", "verbose": False}
    return {
        "name": lambda: opkiln.load(f"op{HIGH}", [str(source)], **more),
        "source": lambda: load(f"{where}/{HIGH}.cpp"),
        "flag": lambda: load(str(source), extra_cflags=[f"-DX={HIGH}"]),
        "other flag": lambda: load(str(source), extra_cflags=["-DX=\udfff"]),
        "link flag": lambda: load(str(source), extra_ldflags=[f"-L/{HIGH}"]),
        "include": lambda: load(str(source), extra_include_paths=[f"/{HIGH}"]),
        "text": lambda: opkiln.load_inline("op", [text], **more),
        "builder": lambda: opkiln.get_builder(f"op{HIGH}"),
        "store": lambda: _in_store(f"/{HIGH}", str(source)),
    }


def _in_store(path: str, source: str) -> None:
    with settings.override(cache_dir=path):
        load(source)


@pytest.mark.parametrize("where", [
    "name", "source", "flag", "other flag", "link flag", "include", "text", "builder", "store",
])  # fmt: skip
def test_a_lone_surrogate_is_a_clear_error_that_can_be_printed(where: str, tmp_path: Path) -> None:
    with pytest.raises(OpkilnError) as caught:
        surrogates(tmp_path)[where]()
    assert str(caught.value).encode()
    assert "codec" not in str(caught.value)


def test_a_missing_path_finds_the_programs_of_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (lambda: monkeypatch.delenv("PATH"), lambda: monkeypatch.setenv("PATH", "")):
        monkeypatch.setenv("PATH", "/usr/bin")
        change()
        said = process.capture(["/bin/sh", "-c", 'echo "$PATH"; command -v ls']).output
        assert said.splitlines()[0] == os.pathsep.join(settings.settings.path)
        assert said.splitlines()[1].endswith("/ls")


@pytest.mark.parametrize("path", ["/", "/tmp", "/dev/null", "fifo"])
def test_a_trace_does_not_replace_what_is_not_a_file(path: str, tmp_path: Path) -> None:
    if path == "fifo":
        path = str(tmp_path / "fifo")
        os.mkfifo(path)
    kind = stat.S_IFMT(os.stat(path).st_mode)
    with pytest.raises(SettingError, match="cannot be written: that is not a regular file"):
        ChromeTrace(path)
    assert stat.S_IFMT(os.stat(path).st_mode) == kind


def test_a_trace_behind_a_link_leaves_the_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "trace.json")
    ChromeTrace(str(tmp_path / "link")).close()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "trace.json").is_file()


def test_a_disk_without_inodes_is_not_told_by_its_bytes(tmp_path: Path) -> None:
    code = f"""
    import os, subprocess, sys
    from opkiln.errors import StoreError
    from opkiln.store import publish
    place, leaf = {str(tmp_path / "full")!r}, {str(tmp_path / "leaf")!r}
    os.mkdir(place); os.mkdir(leaf); open(leaf + "/op.so", "w").close()
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=8,size=1m", "none", place]
    subprocess.run(mount, check=True)
    try:
        for number in range(8): open(f"{{place}}/{{number}}", "w").close()
    except OSError: pass
    try: publish.publish(leaf, place, "ops/a/b")
    except StoreError as error: print(error)
    """
    prefix = ("unshare", "-m") if os.getuid() == 0 else ("unshare", "-rm")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mounts here")
    said = child.run(code, prefix=prefix)
    assert "no inode is free there: it has 8 files" in said


def test_a_full_disk_is_told_by_its_bytes(tmp_path: Path) -> None:
    assert "bytes are free there" in publish.room_in_words(os.statvfs(tmp_path))


def test_an_error_of_python_that_is_no_mistake_of_the_callers_stays(tmp_path: Path) -> None:
    @opkiln.errors.told_briefly
    def missing() -> None:
        (tmp_path / "absent").read_text()

    with pytest.raises(FileNotFoundError):
        missing()
    assert not issubclass(FileNotFoundError, UsageError)
