"""Flags of real packages, as plans take them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opkiln.base.model import CUDA, OpSpec
from opkiln.compat.torch.flags import shell_words, translate
from opkiln.errors import ArchError, SpecError
from opkiln.plan import plan as plans

# What a package gives nvcc; what a plan is given; the architectures; whether there is a remark.
DEVICE = [
    (["--threads", "4"], [], "", True),
    (["--threads=4"], [], "", True),
    (["-t4"], [], "", True),
    (["-t", "2", "-O3"], ["-O3"], "", True),
    (["-gencode", "arch=compute_80,code=sm_80"], [], "8.0", False),
    (["-gencode=arch=compute_90a,code=sm_90a"], [], "9.0a", False),
    (['-gencode=arch=compute_80,code="sm_80,compute_80"'], [], "8.0+PTX", False),
    (["-arch=sm_75"], [], "7.5", False),
    (["-arch=native"], [], "native", False),
    (["--gpu-architecture", "all-major"], [], "all-major", False),
    (["--ptxas-options=-v"], ["--ptxas-options=-v"], "", False),
    (["-Xptxas", '"-v"'], ["-Xptxas=-v"], "", False),
    (["-Xptxas=-v,-O3"], ["-Xptxas=-v,-O3"], "", False),
    (["-Xcompiler", "-fopenmp"], ["-Xcompiler=-fopenmp"], "", False),
    (["-Xcompiler", "-fopenmp -Wall"], ["-Xcompiler=-fopenmp", "-Xcompiler=-Wall"], "", False),
    (["--compiler-options", "'-fPIC'"], ["-Xcompiler=-fPIC"], "", False),
    (["-Xcompiler=-march=native"], [], "", True),
    (["-Xcudafe", "--diag_suppress=20012"], ["-Xcudafe=--diag_suppress=20012"], "", False),
    (["-lineinfo", "--use_fast_math"], ["-lineinfo", "--use_fast_math"], "", False),
    (["-std=c++17", "-O0", "-G"], ["-std=c++17", "-O0", "-G"], "", False),
    (["-U__CUDA_NO_HALF_OPERATORS__"], ["-U__CUDA_NO_HALF_OPERATORS__"], "", False),
    (["--expt-extended-lambda", "-diag-suppress=174"],
     ["--expt-extended-lambda", "-diag-suppress=174"], "", False),
    (["-split-compile=0", "--keep", "-x", "cu", "-MD"], [], "", True),
    (["-rdc=true", "-dlto"], ["-rdc=true"], "", True),
    (["-dc"], ["-dc"], "", False),
    (["", " -O2 "], ["-O2"], "", False),
    (["-isystem", "/opt/a", "-I", "/opt/b"], ["-isystem=/opt/a", "-I/opt/b"], "", False),
]  # fmt: skip
CXX = [
    (["-g", "-O0", "-fopenmp", "-std=c++17"], ["-g", "-O0", "-fopenmp", "-std=c++17"], False),
    (["-march=native", "-O3"], ["-O3"], True),
    (["-mtune=native"], [], False),
    (["-MMD", "-MF", "x.d", "-save-temps"], [], False),
    (["-x", "c++", "-Wall"], ["-Wall"], False),
    (["-I", "/opt/a", "-include", "torch/extension.h"],
     ["-I/opt/a", "-includetorch/extension.h"], False),
]  # fmt: skip


@pytest.mark.parametrize(("given", "taken", "archs", "told"), DEVICE)
def test_what_packages_tell_nvcc(
    given: list[str], taken: list[str], archs: str, told: bool
) -> None:
    found = translate("x", device=given)
    assert list(found.device) == taken
    assert found.archs == archs
    assert bool(found.remarks) is told
    spec = OpSpec("x", "x", "/x", ("x.cu",), backend=CUDA, device_args=found.device)
    plans.check(spec)  # nothing of it is refused


@pytest.mark.parametrize(("given", "taken", "native"), CXX)
def test_what_packages_tell_the_host_compiler(
    given: list[str], taken: list[str], native: bool
) -> None:
    found = translate("x", cxx=given)
    assert list(found.cxx) == taken
    assert found.native is native
    plans.check(OpSpec("x", "x", "/x", ("x.cpp",), cxx_args=found.cxx))


@pytest.mark.parametrize("flag", [["-ccbin", "no-such-gcc"], ["-ccbin=no-such-gcc"]])
def test_a_host_compiler_for_nvcc_is_refused_with_the_variable_that_names_it(
    flag: list[str],
) -> None:
    with pytest.raises(SpecError, match="-ccbin") as caught:
        translate("x", device=flag)
    assert caught.value.hint.startswith("NVCC_CCBIN=no-such-gcc")


@pytest.mark.parametrize("name", ["cc", "gcc", "g++", "x-cc", "gcc-9", "clang"])
def test_the_host_compiler_by_any_of_its_names_is_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cxx = {"cc": "c++", "gcc": "g++", "x-cc": "x-c++", "gcc-9": "g++-9", "clang": "clang++"}
    for program in {name, cxx.get(name, name)}:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx.get(name, name))
    for given in (["-ccbin", name], [f"-ccbin={tmp_path / name}"]):
        found = translate("x", device=given)
        assert found.device == ()
        assert "is the host compiler anyway" in found.remarks[0]


@pytest.mark.parametrize(
    ("cxx", "device"),
    [(["-wrapper", "/bin/sh"], []), (["-fplugin=x.so"], []), (["-o", "x"], []), (["@file"], []),
     ([], ["-optf", "file"]), ([], ["--run"]), ([], ["-Xcompiler", "-fplugin=x.so"])],
)  # fmt: skip
def test_what_starts_other_programs_is_refused_as_ever(cxx: list[str], device: list[str]) -> None:
    found = translate("x", cxx, device)
    spec = OpSpec("x", "x", "/x", ("x.cu",), cxx_args=found.cxx, device_args=found.device,
                  backend=CUDA)  # fmt: skip
    with pytest.raises(SpecError, match="is not allowed"):
        plans.check(spec)


@pytest.mark.parametrize("flag", ["-flto=auto", "-flto=8", "-flto=jobserver"])
def test_link_time_optimization_runs_in_one_process(flag: str) -> None:
    found = translate("x", cxx=[flag], link=[flag, "-flto=thin"])
    assert (found.cxx, found.link) == (("-flto",), ("-flto", "-flto=thin"))


def test_an_architecture_that_is_none_is_quoted() -> None:
    with pytest.raises(ArchError, match="compute"):
        translate("x", device=["-gencode=arch=compute_80,code=whatever"])


def test_paths_are_those_of_the_directory_that_the_script_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("forced.h").touch()
    Path("libmine.a").touch()
    Path("symbols.map").touch()
    found = translate(
        "x",
        cxx=["-Iinclude", "-I", "more", "-include", "forced.h", "-isystem../system"],
        device=["-Iinclude", "-include", "forced.h"],
        link=["-Llib", "libmine.a", "-Wl,--version-script=symbols.map", "-Wl,-rpath,$ORIGIN",
              "-lm", "no-such.a"],
    )  # fmt: skip
    here = os.fspath(tmp_path)
    assert found.cxx == (
        f"-I{here}/include", f"-I{here}/more", f"-include{here}/forced.h",
        f"-isystem{tmp_path.parent}/system",
    )  # fmt: skip
    assert found.device == (f"-I{here}/include", f"-include={here}/forced.h")
    assert found.link == (
        f"-L{here}/lib", f"{here}/libmine.a", f"-Wl,--version-script={here}/symbols.map",
        "-Wl,-rpath,$ORIGIN", "-lm", "no-such.a",
    )  # fmt: skip


def test_flags_of_load_are_read_as_ninja_and_a_shell_read_them() -> None:
    given = ["-O3 -march=native", r"-DNAME=\"x\"", "-DTEXT='\"a b\"'", r"-Wl,-rpath,\$$ORIGIN"]
    assert shell_words(given) == [
        "-O3", "-march=native", '-DNAME="x"', '-DTEXT="a b"', "-Wl,-rpath,$ORIGIN",
    ]  # fmt: skip
    assert shell_words(None) == []
