"""Compilers: the real ones, replaced ones, and the odd paths they are given."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.compiler import Compiler, rename, torch_like
from sample.package import rest

from opkiln.errors import ToolchainError
from opkiln.loading.explain import explain
from opkiln.machine.toolchain import host
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from pathlib import Path

    from sample.package import Package, Steps


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def changes(package: Package) -> str:
    return "\n".join(explain(package.builder().op()).changes)


def test_the_machines_compiler_is_known_by_what_decides_its_output() -> None:
    found = host.choose(Store().memory)
    assert found.family in ("gcc", "clang")
    assert os.path.isabs(found.cxx)
    assert found.include_dirs
    assert found.accepts
    again = host.recall(Store().memory)
    assert again == found, "a probe is made once and remembered"


def test_a_compiler_replaced_in_place_is_another_one_and_rebuilds_once(
    plain: Package, compiler: Compiler
) -> None:
    compiler.write(version="g++ (Made up) 98.1")
    plain.load()
    assert len(compiler.compiles()) == 3
    compiler.write(version="g++ (Made up) 98.1", note="another build of the same version")
    assert "but its programs are others now" in changes(plain)
    for _ in range(3):
        plain.load()
    assert len(compiler.compiles()) == 6
    compiler.write(version="g++ (Made up) 99.2")
    assert "compiler gcc: g++ (Made up) 98.1 -> g++ (Made up) 99.2" in changes(plain)
    plain.load()
    assert len(compiler.compiles()) == 9


def test_the_same_compiler_under_another_path_is_a_hit(
    plain: Package, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain.load()
    copy = tmp_path / "elsewhere"
    shutil.copy(compiler.path, copy)
    monkeypatch.setenv("CXX", str(copy))
    plain.load()
    assert len(compiler.compiles()) == 3


def test_a_link_that_is_turned_to_another_compiler_rebuilds(
    plain: Package, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other-g++"
    other.write_text(compiler.path.read_text() + "# another\n")
    other.chmod(0o755)
    link = tmp_path / "g++"
    link.symlink_to(compiler.path)
    monkeypatch.setenv("CXX", str(link))
    plain.load()
    link.unlink()
    link.symlink_to(other)
    plain.load()
    assert len(compiler.compiles()) == 6


def test_clang_builds_beside_gcc(
    plain: Package, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    if shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed")
    plain.load()
    monkeypatch.setenv("CXX", "clang++")
    assert plain.load().add(1, 2) == 103
    assert steps.linked == 2


def test_a_named_compiler_that_is_absent_is_an_error_even_where_another_is_there(
    plain: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError) as caught:
        plain.load()
    assert "no-such-compiler (CXX): no such program" in caught.value.why


def test_a_launcher_runs_before_each_compile_and_is_no_part_of_the_key(
    plain: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: Steps
) -> None:
    log = tmp_path / "launched"
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\necho x >> '{log}'\nexec \"$@\"\n")
    launcher.chmod(0o755)
    rest()
    monkeypatch.setenv("CXX", f"{launcher} g++")
    plain.load()
    assert log.read_text().split() == ["x"] * 3, "the link needs no launcher"
    monkeypatch.delenv("CXX")
    plain.load()
    assert steps.linked == 1


@pytest.mark.counts_compiles
def test_a_torch_upgraded_in_place_rebuilds_a_full_abi_op_once_and_a_stable_one_never(
    tmp_path: Path,
) -> None:
    torch = torch_like(tmp_path / "env", "2.90.0+cpu")
    (tmp_path / "op.cpp").write_text('extern "C" int f() { return 1; }\n')
    code = """
        import sys
        from opkiln.loading.explain import explain
        from opkiln.decision.terms import BUILD, Request
        from opkiln.loading import loader
        from opkiln.base.model import Op, OpSpec
        for abi in ("torch", "torch-stable"):
            spec = OpSpec(abi.replace("-", "_"), "test", sys.argv[1], ("op.cpp",), abi=abi)
            changes = explain(Op(spec)).changes
            made, _ = loader.obtain(Request(Op(spec), BUILD))
            print(abi, made.compiled, " ".join(changes))
        assert "torch" not in sys.modules
    """

    def load() -> list[list[str]]:
        out = child.run(code, str(tmp_path), path=[tmp_path / "env"])
        return [line.split() for line in out.splitlines()]

    assert [line[:2] for line in load()] == [["torch", "1"], ["torch-stable", "1"]]
    assert [line[:2] for line in load()] == [["torch", "0"], ["torch-stable", "0"]]
    rename(torch, "2.91.0+cpu")
    full, stable = load()
    assert full[:4] == ["torch", "1", "target", "abi_tag:"]
    assert "torch-2.90.0+cpu" in full[4]
    assert "torch-2.91.0+cpu" in full[6]
    assert stable == ["torch-stable", "0"]
    assert [line[:2] for line in load()] == [["torch", "0"], ["torch-stable", "0"]]


def test_the_child_of_a_build_cannot_be_steered_by_the_callers_python(
    plain: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('steered')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "sitecustomize.py"))
    assert plain.load().add(1, 2) == 103
