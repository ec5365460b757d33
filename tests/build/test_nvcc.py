"""The real nvcc: what is said of it is what it says, and its record is enough to build with."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from sample import pool
from sample.evidence_of import broken, recalled
from sample.toolkit import compile_once

import opkiln
from opkiln.base.build_model import DeviceCompiler, Toolchain
from opkiln.errors import ToolchainError
from opkiln.machine.toolchain import cuda_version, find, host, nvcc, torch_sdk
from opkiln.settings import override
from opkiln.store.layers import Store

_KERNEL = """\
#include <cuda_runtime.h>
#include <cuda/std/type_traits>
template <typename T> __global__ void twice(T* data) {
  static_assert(cuda::std::is_floating_point_v<T>);
  data[threadIdx.x] *= 2;
}
extern "C" int launch(float* data) {
  twice<float><<<1, 32>>>(data);
  return cudaGetLastError();
}
"""

# It does not compile, for the host or for a device, unless every flag is there.
_FLAGGED = """\
#include <included.h>
#include "quoted.h"
#if !defined(INCLUDED) || !defined(QUOTED)
#error a directory is missing
#endif
__device__ __host__ inline int sum() { return FORTY + TWO + Before{0}.zero; }
__global__ void fill(int* x) { *x = sum(); }
extern "C" int total() { return sum(); }
extern "C" void launch(int* x) { fill<<<1, 1>>>(x); }
"""

pytestmark = pytest.mark.skipif(not nvcc.available(), reason="no nvcc on this machine")


@pytest.fixture
def memory() -> tuple[str, ...]:
    return Store().memory


@pytest.fixture
def chain(memory: tuple[str, ...]) -> Toolchain:
    return host.choose(memory)


@pytest.fixture
def compiler(memory: tuple[str, ...], chain: Toolchain) -> DeviceCompiler:
    return find.choose(nvcc, memory, None, chain)


def build(compiler: DeviceCompiler, cxx: str, where: Path) -> Path:
    """A library of one kernel, made with nothing but what the record says."""
    source, compiled, library = where / "kernel.cu", where / "kernel.o", where / "kernel.so"
    source.write_text(_KERNEL)
    flags = [
        flag for flag in sorted(compiler.accepts) if flag.startswith("-") and "++17" not in flag
    ]
    flags = [word for flag in flags for word in ((flag, "2") if flag == "--threads" else (flag,))]
    newest = compiler.archs[-1].replace(".", "")
    words = ["-ccbin", compiler.host or cxx, *flags, f"-arch=sm_{newest}", "-Xcompiler", "-fPIC",
             "-c", str(source), "-o", str(compiled)]  # fmt: skip
    assert compile_once(pool.ROOT / "nvcc", compiler.path, words) == 0
    search = [f"-L{path}" for path in compiler.library_dirs]
    subprocess.run(
        [cxx, "-shared", compiled, "-o", library, *search,
         "-lcudart_static", "-ldl", "-lrt", "-lpthread"],
        check=True,
    )  # fmt: skip
    return library


def test_the_architectures_are_those_that_nvcc_lists(compiler: DeviceCompiler) -> None:
    listed = subprocess.run(
        [compiler.path, "--list-gpu-arch"], check=True, capture_output=True, text=True
    ).stdout.split()
    assert {f"compute_{arch.replace('.', '')}" for arch in compiler.archs} == set(listed)
    numbers = [tuple(map(int, arch.split("."))) for arch in compiler.archs]
    assert numbers == sorted(numbers)
    assert cuda_version.get_default_compute_capabilities() == ";".join(compiler.archs)


def test_the_version_is_the_one_that_nvcc_says(compiler: DeviceCompiler) -> None:
    said = subprocess.run([compiler.path, "--version"], check=True, capture_output=True, text=True)
    assert f"release {compiler.version}," in said.stdout
    major, minor = map(int, compiler.version.split("."))
    assert cuda_version.installed_cuda_version() == (major, minor)


def test_the_record_is_complete(compiler: DeviceCompiler) -> None:
    assert compiler.family == "nvcc"
    assert os.path.realpath(compiler.path) == compiler.path
    with open(compiler.path, "rb") as file:
        assert file.read(4) == b"\x7fELF"  # the program itself, whatever PATH leads to
    assert compiler.path.startswith(compiler.home + "/")
    assert any(os.path.exists(f"{path}/cuda_runtime.h") for path in compiler.include_dirs)
    assert compiler.library_dirs
    assert all(os.path.exists(f"{path}/libcudart_static.a") for path in compiler.library_dirs)
    assert len(compiler.identity) == 40
    if compiler.version == "13.0":
        assert compiler.accepts >= {
            "-std=c++20", "--threads", "--compress-mode=size", "--objdir-as-tempdir",
            "90a", "100a", "100f", "103a", "103f", "120a", "120f", "121a", "121f",
        }  # fmt: skip
        assert not compiler.accepts & {"90f", "80a", "89f", "75a"}


def test_the_identity_is_the_same_when_it_is_asked_anew(
    compiler: DeviceCompiler, chain: Toolchain, memory: tuple[str, ...], tmp_path: Path
) -> None:
    assert find.choose(nvcc, (str(tmp_path),), None, chain) == compiler
    assert find.recall(nvcc, memory, None, chain) == compiler


def test_a_link_to_nvcc_is_followed_to_its_toolkit(
    compiler: DeviceCompiler, chain: Toolchain, memory: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "nvcc").symlink_to(compiler.path)
    with override(path=(str(tmp_path), *os.environ["PATH"].split(":"))):
        assert find.choose(nvcc, memory, None, chain) == compiler


def test_a_kernel_is_built_with_what_the_record_says(
    compiler: DeviceCompiler, chain: Toolchain, tmp_path: Path
) -> None:
    library = build(compiler, chain.cxx, tmp_path)
    launched = ctypes.CDLL(str(library)).launch(None)
    assert isinstance(launched, int)  # with no GPU an error's number; the runtime is all inside


def test_a_host_compiler_that_nvcc_does_not_support_is_refused_with_the_range(
    memory: tuple[str, ...], chain: Toolchain, tmp_path: Path
) -> None:
    real = shutil.which("g++")
    if real is None:
        pytest.skip("no g++")
    future = tmp_path / "g++-99"
    future.write_text(f"#!/bin/sh\nexec '{real}' -U__GNUC__ -D__GNUC__=99 \"$@\"\n")
    future.chmod(0o755)
    with override(ccbin=str(future)), pytest.raises(ToolchainError) as caught:
        find.choose(nvcc, memory, None, chain)
    assert str(future) in caught.value.what
    assert "unsupported GNU version! gcc versions later than" in caught.value.why
    assert "NVCC_CCBIN=" in caught.value.hint


def test_another_host_compiler_is_used_where_it_is_asked_for(
    memory: tuple[str, ...], chain: Toolchain, compiler: DeviceCompiler, tmp_path: Path
) -> None:
    names = ("clang++", "clang++-15", "g++-11", "g++-12", "g++-13")
    own = os.path.realpath(chain.cxx)
    found = [path for path in map(shutil.which, names) if path is not None]
    others = [path for path in found if os.path.realpath(path) != own]
    if not others:
        pytest.skip("there is only one host compiler")
    with override(ccbin=others[0]):
        other = find.choose(nvcc, memory, None, chain)
        assert find.recall(nvcc, memory, None, chain) == other
    assert other.host == others[0]
    assert other.identity != compiler.identity
    assert build(other, chain.cxx, tmp_path).exists()


def test_flags_and_directories_of_the_user_reach_host_and_device_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("included", "quoted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.h").write_text(f"#define {name.upper()} 1\n")
    (tmp_path / "op.cu").write_text(_FLAGGED)
    monkeypatch.setenv("OPKILN_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path / "included"))
    flags = f"-DFORTY=40 -iquote {tmp_path}/quoted -Wdate-time -D TWO=2"
    (tmp_path / "before.h").write_text("#pragma once\nstruct Before { int zero; };\n")
    monkeypatch.setenv("CPPFLAGS", f"{flags} -include {tmp_path}/before.h")
    library = opkiln.load("op", [str(tmp_path / "op.cu")], is_python_module=False, abi="none")
    assert library.total() == 42


def test_there_is_evidence_for_the_choice(
    memory: tuple[str, ...], compiler: DeviceCompiler
) -> None:
    sdk = torch_sdk.find()
    if sdk is not None and sdk.cuda is not None:
        pytest.skip("the compiler was chosen for a torch without CUDA")
    again, read = recalled(nvcc, memory, None, host.choose(memory))
    assert (again, broken(read)) == (compiler, set())
    assert {compiler.path, f"{compiler.home}/bin/ptxas"} <= set(read.files)
