"""Finding compilers, remembering what probes said, and reading torch without importing it."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from sample import at_rest

from opkiln.base.model import OpSpec
from opkiln.errors import ToolchainError
from opkiln.machine.toolchain import find, host, probing, torch_sdk
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timed


def program(path: Path, body: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def at_rest_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    at_rest.shorten(monkeypatch)


def test_programs_are_found_in_the_order_of_path(tmp_path: Path) -> None:
    for directory in ("a", "b"):
        program(tmp_path / directory / "g++")
    (tmp_path / "c" / "g++").mkdir(parents=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "g++").write_text("not executable")
    with override(path=(*(str(tmp_path / name) for name in "cdba"), "relative", "")):
        found = list(find.on_path("g++"))
    assert found == [str(tmp_path / "b" / "g++"), str(tmp_path / "a" / "g++")]


def test_a_name_with_a_slash_is_itself(tmp_path: Path) -> None:
    tool = program(tmp_path / "my-g++")
    with override(path=()):
        assert find.find_program(str(tool)) == str(tool)
        assert find.find_program(str(tmp_path / "absent")) is None


def test_a_named_compiler_that_is_absent_is_not_replaced_by_another(tmp_path: Path) -> None:
    program(tmp_path / "g++")
    with override(cxx=("no-such-g++",), path=(str(tmp_path),)):
        (only,) = find.cxx_candidates()
        assert (only.path, only.refused) == ("no-such-g++", "no such program")
        assert not host.available()


def test_one_compiler_under_two_names_is_asked_once(tmp_path: Path) -> None:
    real = program(tmp_path / "real")
    for name in ("g++", "c++"):
        (tmp_path / name).symlink_to(real)
    with override(path=(str(tmp_path),)):
        found = [(each.path, each.refused) for each in find.cxx_candidates()]
    assert found == [(str(tmp_path / "g++"), ""), ("clang++", "not on PATH")]


@pytest.mark.parametrize(("answers", "reason"), [
    ("echo broken install; exit 3", "--version exits with 3: broken install"),
    ('case "$*" in *--version*) echo "g++ 99";; *) echo "Target: sparc64-linux-gnu";; esac',
     "compiles for sparc64-linux-gnu, not for"),
    ('case "$*" in *--version*) echo "g++ 4";; *) echo "no c++20 here" >&2; exit 1;; esac',
     "does not take -std=c++20: no c++20 here"),
], ids=["broken", "another machine", "an old standard"])  # fmt: skip
def test_without_any_compiler_each_candidate_is_listed_with_its_refusal(
    tmp_path: Path, answers: str, reason: str
) -> None:
    program(tmp_path / "g++", answers)
    with override(path=(str(tmp_path),)), pytest.raises(ToolchainError) as caught:
        host.choose((str(tmp_path / "memory"),))
    assert f"{tmp_path}/g++ (PATH): {reason}" in caught.value.why
    assert "clang++ (PATH): not on PATH" in caught.value.why
    assert "CXX" in caught.value.hint


def test_a_script_is_asked_with_the_variables_that_it_compiles_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the key of what it makes, and it is asked again when one of them is another."""
    real = shutil.which("g++") or shutil.which("clang++")
    assert real is not None
    told = f'echo "$CONDA_PREFIX" >> {tmp_path}/told; exec {real} "$@"'
    script, memory = program(tmp_path / "bin" / "g++", told), (str(tmp_path / "memory"),)
    at_rest.wait(script)
    for value in ("one", "one", "two"):
        monkeypatch.setenv("CONDA_PREFIX", value)
        with override(cxx=(str(script),)):
            found = host.choose(memory)
        assert dict(found.environment)["CONDA_PREFIX"] == value
    said = (tmp_path / "told").read_text().split()
    assert said == sorted(said)
    assert said.count("one") == said.count("two")
    with override(cxx=(real,)):
        assert "CONDA_PREFIX" not in dict(host.choose(memory).environment)


def test_a_record_is_believed_until_one_of_its_files_changes(tmp_path: Path) -> None:
    one, two = program(tmp_path / "one"), program(tmp_path / "two")
    at_rest.wait(one, two)
    probing.remember((str(tmp_path / "memory"),), "cc", {"version": "9"}, [str(one), str(two)])
    found = probing.recall((str(tmp_path / "memory"),), "cc")
    assert found is not None
    assert found["version"] == "9"
    assert probing.recall((str(tmp_path / "memory"),), "other") is None
    two.write_text("changed")
    assert probing.recall((str(tmp_path / "memory"),), "cc") is None


def test_a_record_about_a_file_that_was_just_written_is_not_believed(tmp_path: Path) -> None:
    tool = program(tmp_path / "tool")
    probing.remember((str(tmp_path),), "cc", {"version": "9"}, [str(tool)])
    assert probing.recall((str(tmp_path),), "cc") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema": 99, "subject": "cc"}', "\xff"]
)
def test_a_damaged_record_is_not_believed(tmp_path: Path, text: str) -> None:
    probing.remember((str(tmp_path),), "cc", {}, [])
    (record,) = tmp_path.iterdir()
    assert probing.recall((str(tmp_path),), "cc") is not None
    record.write_text(text)
    assert probing.recall((str(tmp_path),), "cc") is None


def test_a_record_that_names_another_subject_is_not_believed(tmp_path: Path) -> None:
    probing.remember((str(tmp_path),), "cc", {}, [])
    (record,) = tmp_path.iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "subject": "cxx"}))
    assert probing.recall((str(tmp_path),), "cc") is None


def test_a_record_is_read_from_every_directory_and_written_to_the_first(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    probing.remember((two,), "cc", {"version": "9"}, [])
    assert probing.recall((one, two), "cc") is not None
    probing.remember((one, two), "cxx", {"version": "9"}, [])
    assert probing.recall((two,), "cxx") is None
    assert probing.recall((one,), "cxx") is not None
    probing.remember((), "cc", {}, [])
    assert probing.recall((), "cc") is None


def test_directories_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        probing.remember((str(tmp_path / "a" / "b"),), "cc", {}, [])
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in sorted(tmp_path.rglob("*"))]
    assert modes == [0o700, 0o700, 0o600]


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    probing.remember((str(tmp_path / "file" / "memory"),), "cc", {}, [])
    assert probing.recall((str(tmp_path / "file" / "memory"),), "cc") is None


def a_torch(path: Path, version: str = "2.13.0+cpu", more: str = "") -> Path:
    path.mkdir(exist_ok=True)
    (path / "__init__.py").write_text("raise ImportError('must not be imported')")
    (path / "version.py").write_text(
        "from typing import Optional\n"
        f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = None\n"
        f"hip: Optional[str] = None\n{more}"
    )
    return path


def read(path: Path) -> torch_sdk.TorchSDK:
    state = (path / "version.py").stat()
    return torch_sdk._read(str(path), (state.st_mtime_ns, state.st_ctime_ns))


def test_torch_is_read_from_its_files(tmp_path: Path) -> None:
    sdk = read(a_torch(tmp_path / "torch", "2.14.1+cu130"))
    assert (sdk.version, sdk.cuda, sdk.hip, sdk.cxx11_abi) == ("2.14.1+cu130", None, None, True)


def test_a_torch_upgraded_in_place_is_another_torch(tmp_path: Path) -> None:
    before = read(a_torch(tmp_path / "torch"))
    nightly = read(a_torch(tmp_path / "torch", more="git_version = 'abc'\n"))
    after = read(a_torch(tmp_path / "torch", "2.14.0+cpu"))
    assert len({before.identity, nightly.identity, after.identity}) == 3
    tags = {torch_sdk.full_abi_tag(sdk) for sdk in (before, nightly, after)}
    assert len(tags) == 3


def test_the_stable_tag_holds_no_torch_version_and_no_python() -> None:
    spec = OpSpec("op", "package", "/src", ("a.cpp",))
    assert torch_sdk.abi_tag(spec, None) == "torch-stable-2.10"


def test_an_old_c_plus_plus_abi_is_noticed(tmp_path: Path) -> None:
    path = a_torch(tmp_path / "torch")
    config = path / "share" / "cmake" / "Torch"
    config.mkdir(parents=True)
    (config / "TorchConfig.cmake").write_text('set(FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")')
    assert not read(path).cxx11_abi


@pytest.mark.parametrize(
    ("version", "stable"),
    [("2.9.1+cpu", False), ("2.10.0", True), ("2.13.0a0+git1", True), ("3.0.0", True),
     ("1.13.1", False), ("unknown", False)],
)  # fmt: skip
def test_the_stable_abi_begins_with_2_10(tmp_path: Path, version: str, stable: bool) -> None:
    assert torch_sdk.has_stable_abi(read(a_torch(tmp_path / "torch", version))) is stable
