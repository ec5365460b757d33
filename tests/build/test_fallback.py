"""Where the native op cannot be had: the reference and the reason, or an error."""

from __future__ import annotations

import os
import signal
import warnings
import zipfile
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest
import torch
from sample import child, forks
from sample.compiler import torch_like
from sample.levels import HIGH, LEVELS, kernel_flags, lacks
from sample.package import settle

import opkiln
from opkiln.errors import (
    CompilingOff,
    FallbackWarning,
    LoadError,
    LoadTestError,
    SealedError,
    StoreError,
    ToolchainError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package, Steps

X, Y = torch.arange(6.0), torch.ones(6)


@pytest.fixture
def stable(package: Callable[..., Package]) -> Package:
    return package("stable")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_zipapp_is_served_by_the_reference_and_says_that_its_sources_are_packed(
    stable: Package, tmp_path: Path
) -> None:
    archive = tmp_path / "app.pyz"
    with zipfile.ZipFile(archive, "w") as packed:
        for root in (child.SOURCE / "opkiln", stable.path):
            for file in root.rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    packed.write(file, file.relative_to(root.parent))
        packed.writestr(
            "__main__.py",
            f"import torch\nfrom {stable.name}.op import StableBuilder\n"
            "print(StableBuilder().load().axpy(torch.ones(2), torch.ones(2), 2.0).tolist())\n",
        )
    env = {**os.environ, "PYTHONPATH": ""}
    done = child.finish(forks.Fork([str(archive)], stdout=PIPE, stderr=PIPE, text=True, env=env))
    assert (done.returncode, done.stdout) == (0, "[3.0, 3.0]\n"), done.stderr
    assert "FallbackWarning: op stable runs as its pure-PyTorch reference" in done.stderr
    assert f"its sources are inside {archive}" in done.stderr


def test_a_process_that_ignores_sigchld_is_told_so_and_not_to_install_a_compiler(
    stable: Package,
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.warns(FallbackWarning) as caught:
            stable.builder().load()
    finally:
        signal.signal(signal.SIGCHLD, before)
    text = str(caught[0].message)
    assert "is lost\n  this process ignores SIGCHLD" in text
    assert "apt-get" not in text


@pytest.mark.usefixtures("no_compiler")
def test_a_cold_cache_without_a_compiler_falls_back_and_says_why(stable: Package) -> None:
    builder = stable.builder()
    with pytest.warns(FallbackWarning) as caught:
        functions = builder.load()
    (told,) = caught
    text = str(told.message)
    assert "op stable runs as its pure-PyTorch reference: no C++ compiler can be used" in text
    assert "g++ (PATH): not on PATH" in text
    assert "hint: apt-get install g++" in text
    assert functions.who(X) == 0
    assert torch.equal(functions.axpy(X, Y, 2.0), 2 * X + Y)
    assert builder.error_log is not None
    assert "no C++ compiler" in builder.error_log
    assert not builder.is_compatible()


@pytest.mark.usefixtures("no_compiler")
def test_the_warning_is_given_once_per_op_and_for_each_op(
    stable: Package, package: Callable[..., Package]
) -> None:
    with pytest.warns(FallbackWarning):
        stable.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stable.load().who(X) == 0
    with pytest.warns(FallbackWarning):
        package("stable").load()


@pytest.mark.usefixtures("no_compiler")
def test_what_was_asked_for_by_name_does_not_fall_back(stable: Package, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler can be used"):
        stable.builder().jit_load()
    source = tmp_path / "a.cpp"
    source.write_text("int x;\n")
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler can be used"):
        opkiln.load("asked", [str(source)], abi="none", is_python_module=False)


@pytest.mark.usefixtures("no_compiler")
def test_jit_load_after_a_fallback_is_still_an_error(stable: Package) -> None:
    with pytest.warns(FallbackWarning):
        stable.load()
    with pytest.raises(ToolchainError):
        stable.builder().jit_load()


@pytest.mark.usefixtures("no_compiler")
def test_native_mode_makes_a_fallback_an_error(
    stable: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "native")
    with pytest.raises(ToolchainError):
        stable.load()


@pytest.mark.usefixtures("no_compiler")
def test_an_op_without_a_reference_is_an_error(plain: Package) -> None:
    with pytest.raises(ToolchainError) as caught:
        plain.load()
    assert caught.value.exit_code == 3


def test_jit_off_never_compiles(
    stable: Package, plain: Package, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "cached")
    with pytest.warns(FallbackWarning, match="OPKILN_MODE=cached"):
        assert stable.load().who(X) == 0
    with pytest.raises(CompilingOff, match="would have to be compiled") as caught:
        plain.load()
    # The variable is set here, so the command would refuse, too, without its own.
    assert caught.value.hint == "OPKILN_MODE=auto opkiln build plain"
    assert caught.value.exit_code == 7
    builder = plain.builder()
    assert not builder.is_compatible()
    assert "OPKILN_MODE=cached: nothing is compiled here" in builder.error_log
    assert steps.seen == []


def test_jit_off_hint_of_a_call_names_no_command_that_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "cached")
    with pytest.raises(CompilingOff) as caught:
        opkiln.load_inline("by_call", "int x;", abi="none", is_python_module=False)
    assert caught.value.hint.startswith("run it once with OPKILN_MODE=auto")
    assert "opkiln build" not in caught.value.hint


def test_seal_of_the_environment_is_lifted_by_the_hints_own_command(
    plain: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "sealed")
    with pytest.raises(SealedError) as caught:
        plain.load()
    assert caught.value.hint == "OPKILN_MODE=auto opkiln build plain"


def test_jit_off_loads_what_is_cached(plain: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    plain.load()
    monkeypatch.setenv("OPKILN_MODE", "cached")
    assert plain.load().add(1, 2) == 103
    assert plain.builder().is_compatible()


@pytest.mark.usefixtures("unsealed")
def test_after_a_seal_a_compile_is_an_error_and_a_hit_is_not(
    plain: Package, package: Callable[..., Package], steps: Steps
) -> None:
    plain.load()
    opkiln.seal()
    assert plain.load().add(1, 2) == 103
    before = len(steps.seen)
    with pytest.raises(SealedError, match="sealed: nothing may be compiled any more"):
        package("plain").load()
    plain.edit("csrc/add.cpp", "a + b", "a - b")
    with pytest.raises(SealedError):
        plain.load()
    assert len(steps.seen) == before
    opkiln.seal("off")
    assert plain.load().add(1, 2) == 99


@pytest.mark.usefixtures("unsealed")
def test_after_a_seal_an_op_with_a_reference_does_not_fall_back_either(stable: Package) -> None:
    opkiln.seal("error")
    with pytest.raises(SealedError, match="sealed"):
        stable.load()


@pytest.mark.usefixtures("unsealed")
def test_a_seal_may_warn_and_may_come_from_the_environment(
    plain: Package, package: Callable[..., Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    opkiln.seal("warn")
    with pytest.warns(FallbackWarning, match="op plain is compiled after opkiln was sealed"):
        assert plain.load().add(1, 2) == 103
    opkiln.seal("off")
    monkeypatch.setenv("OPKILN_MODE", "sealed")
    with pytest.raises(SealedError):
        package("plain").load()
    with pytest.raises(UsageError, match="expected 'warn', 'error' or 'off'"):
        opkiln.seal("loudly")


def test_a_compile_error_falls_back_with_the_compilers_words(stable: Package) -> None:
    (stable / "csrc/stable.cpp").write_text("int bad = no_such_name;\n")
    settle(*stable.files())
    with pytest.warns(FallbackWarning) as caught:
        assert stable.load().who(X) == 0
    assert "stable.cpp:1:" in str(caught[0].message)
    assert "no_such_name" in str(caught[0].message)


def test_a_library_that_cannot_be_loaded_falls_back_and_is_not_published(
    stable: Package, cache: Path
) -> None:
    (stable / "csrc/stable.cpp").write_text(
        'extern "C" int nowhere();\nextern "C" int f() { return nowhere(); }\n'
    )
    with pytest.warns(FallbackWarning, match="undefined symbol: nowhere"):
        assert stable.load().who(X) == 0
    assert list(cache.glob("v1/ops/*/*/*/*/*")) == []
    with pytest.raises(LoadTestError):
        stable.builder().jit_load()


def test_nowhere_to_build_falls_back_too(
    stable: Package, plain: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_TMPDIR", "/proc/no/such/place")
    with pytest.warns(FallbackWarning, match="cannot create a build directory"):
        assert stable.load().who(X) == 0
    with pytest.raises(StoreError, match="OPKILN_TMPDIR"):
        plain.load()


def test_a_torch_without_the_stable_abi_is_served_by_the_reference(
    stable: Package, tmp_path: Path
) -> None:
    torch_like(tmp_path / "env", "2.9.1+cpu")
    out = child.run(f"""
        import sys, warnings
        import torch
        from {stable.name}.op import StableBuilder
        assert torch.__version__ == "2.9.1+cpu"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            builder = StableBuilder()
            functions = builder.load()
        x = torch.ones(3)
        functions.scale_(x, 2.0)
        print(functions.who(x), x.tolist(), builder.is_compatible())
        print([str(each.message) for each in caught if "opkiln" in str(each.category)])
    """, path=[tmp_path / "env", stable.where], bare=False, forked=False)  # fmt: skip
    first, told = out.splitlines()
    assert first == "0 [2.0, 2.0, 2.0] False"
    assert "needs torch 2.10 or later" in told
    assert "torch 2.9.1+cpu lacks the stable ABI" in told
    assert "pip install" in told


def test_without_torch_at_all_a_torch_op_says_so(stable: Package) -> None:
    done = child.finish(child.start(f"""
        from opkiln.decision.terms import BUILD, Request
        from opkiln.loading import loader
        from {stable.name}.op import StableBuilder
        builder = StableBuilder()
        print(builder.is_compatible(), builder.error_log)
        loader.obtain(Request(builder.op(), BUILD))
    """, path=[stable.where]))  # fmt: skip
    assert done.stdout.startswith("False op stable needs torch")
    assert "LoadError: op stable needs torch\n  torch is not installed" in done.stderr
    assert "hint: pip install torch" in done.stderr


def test_a_cpu_that_cannot_run_what_was_asked_for_is_not_given_it(
    plain: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opkiln.machine import uname

    monkeypatch.setattr(uname, "cpu_flags", lambda: kernel_flags(LEVELS[1]))
    monkeypatch.setenv("OPKILN_CPU", HIGH)
    for _ in range(2):
        with pytest.raises(LoadError) as caught:
            plain.load()
        assert caught.value.what == f"op plain for {HIGH} cannot run here"
        assert lacks(LEVELS[1], than=HIGH) in caught.value.why
        assert caught.value.hint == "OPKILN_CPU=native"
