"""CUDA ops with the real nvcc: what may not change a build does not, and what is asked is done."""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from sample import child, known
from sample.installed import require
from sample.package import Package, rest

import opkiln
from opkiln.base.build_model import Plan
from opkiln.base.model import ABI_NONE, CUDA, PLAIN, PYTHON
from opkiln.builder import CUDAOpBuilder, OpBuilder
from opkiln.building import asking, kernels
from opkiln.decision.terms import BUILD, Request
from opkiln.errors import BuildError, SpecError
from opkiln.machine.binary.fatbin import images
from opkiln.machine.toolchain import choice, nvcc
from opkiln.plan.plan import anchors, command
from opkiln.settings import override
from opkiln.store import key
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Steps

KERNEL = """
#if __has_include("number.h")
#include "number.h"
#endif
#ifndef NUMBER
#define NUMBER 0
#endif
namespace {
template <typename T> __global__ void added(T* x) { x[threadIdx.x] += NUMBER; }
}
extern "C" int value() { return NUMBER; }
extern "C" const char* where() { return __FILE__; }
extern "C" int launch(float* x) { added<<<1, 32>>>(x); return cudaGetLastError(); }
"""


pytestmark = pytest.mark.skipif(not nvcc.available(), reason="no nvcc on this machine")


@pytest.fixture(autouse=True)
def one_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_CUDA_ARCH_LIST", "9.0")


def load(source: Path, **more: Any) -> Any:
    more = {"is_python_module": False, "abi": "none", "verbose": True, **more}
    return opkiln.load("op", [str(source)], **more)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    rest()
    return path


# Variables


def test_variables_that_nvcc_and_its_compilers_read_reach_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    source = write(tmp_path / "src" / "op.cu", KERNEL)
    foreign = write(tmp_path / "foreign" / "number.h", "#define NUMBER 99\n").parent
    for name in ("cc1plus", "as", "ptxas", "cicc"):
        write(foreign / name, f"#!/bin/sh\ntouch {foreign}/canary\nexit 1\n").chmod(0o755)
    variables = {
        "NVCC_APPEND_FLAGS": f"-DAPPENDED -I{foreign} -gencode=arch=compute_75,code=sm_75",
        "NVCC_PREPEND_FLAGS": f"-DPREPENDED -I{foreign}",
        "C_INCLUDE_PATH": str(foreign),
        "COMPILER_PATH": str(foreign),
        "GCC_EXEC_PREFIX": f"{foreign}/",
    }
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.setenv(name, variables[name])
    program = choice.choose(Store().memory, CUDA).device
    assert program is not None
    asked = subprocess.run(
        [program.path, "--dryrun", "-E", source],
        capture_output=True, text=True, check=False,
    ).stderr  # fmt: skip
    assert '-D "APPENDED"' in asked
    assert '-D "PREPENDED"' in asked
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    library = load(source)
    assert library.value() == 0
    assert images(library._name) == ("sm_90",)
    assert not (foreign / "canary").exists()
    for name in variables:
        monkeypatch.delenv(name)
    assert load(source)._name == library._name
    assert steps.compiled == ["op.cu"]


def test_include_directories_from_cpath_are_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "src" / "op.cu", KERNEL)
    header = write(tmp_path / "more" / "number.h", "#define NUMBER 1\n")
    monkeypatch.setenv("CPATH", str(header.parent))
    assert load(source).value() == 1
    monkeypatch.delenv("CPATH")
    assert load(source).value() == 0


# Bytes


def digests(site: Path, store: Path, **variables: str) -> set[str]:
    """Build ``anywhere`` below ``site`` into a store of its own: digests of all that was made."""
    package = Package("cuda", site, "repro")
    write(package / "csrc" / "anywhere.cu", KERNEL)
    known.make_store(store)
    code = (
        "from repro.op import AnywhereBuilder\n"
        "from opkiln.decision.terms import BUILD, Request\n"
        "from opkiln.loading import loader\n"
        "made, _ = loader.obtain(Request(AnywhereBuilder(backend='cuda').op(), BUILD))\n"
        "assert made.origin == 'built', made\n"
    )
    child.run(code, path=[site], env={"OPKILN_CACHE_DIR": str(store), **variables})
    found = [*store.rglob("objects/**/0"), *store.rglob("ops/**/*.so")]
    for path in found:
        assert os.fsencode(site) not in path.read_bytes()
    assert len(found) == 3
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.counts_compiles
def test_two_directories_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CUDA_ARCH_LIST", "9.0a+PTX")
    (tmp_path / "scratch").mkdir()
    one = digests(tmp_path / "one", tmp_path / "store")
    other = digests(
        tmp_path / "a much longer" / "directory", tmp_path / "other store",
        OPKILN_TMPDIR=str(tmp_path / "scratch"), NVCC_THREADS="1",
    )  # fmt: skip
    assert one == other


# Paths and flags, which nvcc hands to a shell

ODD = "a b,'q;touch canary&(#*é|x"


def test_an_op_in_an_oddly_named_directory_builds_and_its_edits_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / ODD / "op.cu", KERNEL)
    header = write(tmp_path / ODD / "include" / "number.h", "#define NUMBER 7\n")
    includes = {"extra_include_paths": [str(header.parent)]}
    library = load(source, **includes)
    assert library.value() == 7
    write(header, "#define NUMBER 8\n")
    library = load(source, **includes)
    assert library.value() == 8
    assert images(library._name) == ("sm_90",)
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.parametrize("name", ["$HOME", "$(touch canary)", "`touch canary`", 'a"b', "a\\b"])
def test_a_directory_whose_name_a_shell_reads_between_quotes_is_one_clear_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc follows the link that leads to the source, and quotes what it finds."""
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / name / "op.cu", KERNEL)
    with pytest.raises(BuildError, match="cannot be passed"):
        load(source, extra_include_paths=[str(tmp_path)])


@pytest.mark.parametrize("name", ["a b.cu", "$(touch canary).cu", "a,b.cu", "`touch canary`.cu"])
def test_a_source_whose_name_a_shell_would_read_is_one_clear_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / name, KERNEL)
    with pytest.raises(BuildError, match="cannot be passed"):
        load(source)
    assert not list(tmp_path.rglob("canary"))


HOSTILE = (
    ("-DA=$(touch canary)",), ("-DA=`touch canary`",), ("-DA=1;touch canary",), ("-DA=1 -DB",),
    ("-DA='x'",), ('-DA="x"',), ("-DA=1|x",), ("-DA=1>canary",), ("-DA=1&",), ("-DA=\\",),
    ("-DA=a\nb",), ("-I/a,b",), ("-ccbin", "/x/evil"), ("-ccbin=/x/evil",),
    ("--compiler-bindir=/x/evil",), ("-optf", "flags"), ("--options-file=flags",), ("@flags",),
    ("-run",), ("-ptx",), ("-cubin",), ("-fatbin",), ("-keep",), ("--keep",), ("-E",), ("-M",),
    ("-MF", "canary"), ("-o", "canary"), ("-odir", "x"), ("--dryrun",), ("-dlink",),
    ("--threads", "8"), ("-t8",), ("-target-dir", "x"), ("--objdir-as-tempdir",),
    ("-Xcompiler=-fplugin=/x/evil.so",), ("-Xcompiler", "-B/x"), ("-Xcompiler=-O2,-wrapper,/x",),
    ("--compiler-options=@flags",), ("-Xcompiler", "-O2,-specs=/x"), ("-lib",), ("-link",),
    ("-time", "canary"), ("-dlto",), ("-ewp",), ("-split-compile=0",),
    ("-Xptxas=-v,-optf,flags",),
    ("-Xptxas=--options-file=flags",), ("-Xptxas", "-o,canary"), ("-Xptxas=-v;touch canary",),
)  # fmt: skip


@pytest.mark.parametrize("flags", HOSTILE, ids=" ".join)
def test_a_flag_that_reaches_past_the_plan_is_refused(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "op.cu", KERNEL)
    with pytest.raises(SpecError, match="is not allowed"):
        load(source, extra_cuda_cflags=list(flags))
    assert steps.seen == []
    assert not list(tmp_path.rglob("canary"))


CALLED = "__device__ float twice(float v) { return 2 * v; }\n"
CALLER = """
extern __device__ float twice(float);
__global__ void doubled(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }
extern "C" int launch(float* x) { doubled<<<1, 32>>>(x); return cudaGetLastError(); }
"""


@pytest.mark.parametrize(
    "flags",
    [
        ("-rdc=true",),
        # The plan is that of -rdc=true: test_flags.py holds the spellings.
        pytest.param(("-dc",), marks=pytest.mark.full),
        pytest.param(("-rdc", "true"), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_device_code_of_two_files_is_linked_for_every_architecture(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_CUDA_ARCH_LIST", "8.0;9.0a+PTX")
    sources = [write(tmp_path / "caller.cu", CALLER), write(tmp_path / "called.cu", CALLED)]
    options = {"is_python_module": False, "abi": "none", "extra_cuda_cflags": list(flags)}
    library = opkiln.load("op", list(map(str, sources)), **options)
    assert library.launch is not None
    # What the device link made is registered; of PTX there is none, since it cannot be linked.
    assert images(library._name) == ("sm_80", "sm_90a")


def test_without_a_device_link_code_of_another_file_is_the_compilers_error(tmp_path: Path) -> None:
    sources = [write(tmp_path / "caller.cu", CALLER), write(tmp_path / "called.cu", CALLED)]
    with pytest.raises(BuildError, match="twice"):
        opkiln.load("op", list(map(str, sources)), is_python_module=False, abi="none")


def test_ordinary_flags_of_nvcc_are_taken(tmp_path: Path) -> None:
    flags = [
        "-O2", "--use_fast_math", "-lineinfo", "-Xptxas=-O3,-dlcm=ca", "--expt-relaxed-constexpr",
        "--expt-extended-lambda", "-std=c++17", "-DNUMBER=5", "-U__CUDA_NO_HALF_OPERATORS__",
        "-Xcompiler=-Wall,-Wno-unused-function", "-Xcompiler", "-fno-strict-aliasing",
        "-maxrregcount=64", "--ftz=true", "-diag-suppress=20012", "-w",
    ]  # fmt: skip
    assert load(write(tmp_path / "op.cu", KERNEL), extra_cuda_cflags=flags).value() == 5


# What can be asked for


class Kernel(CUDAOpBuilder):
    """An op of one CUDA and one C++ source, in a directory that a test chooses."""

    NAME = "kernel"
    BACKENDS = (CUDA,)
    KIND = PLAIN
    ABI = ABI_NONE

    def sources(self) -> list[str]:
        return ["kernel.cu", "host.cpp"]


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[..., Kernel]:
    def make(root: Path = tmp_path) -> Kernel:
        write(root / "kernel.cu", KERNEL)
        write(root / "host.cpp", 'extern "C" int answer() { return 42; }\n')
        made = Kernel()
        made.root = str(root)
        return made

    return make


def planned(builder: OpBuilder) -> Plan:
    op = builder.op()
    return asking.plan_here(Request(op, BUILD))


@pytest.mark.parametrize(
    ("setting", "flag"),
    [("debug_cuda", "-Xptxas=-v"), ("cudaflags", "-DASKED")],
)
def test_a_setting_for_device_code_changes_the_plan_of_device_code_alone(
    kernel: Callable[..., Kernel], setting: str, flag: str
) -> None:
    builder = kernel()
    before = planned(builder)
    value: Any = ("-DASKED",) if setting == "cudaflags" else True
    with override(**{setting: value}):
        after = planned(builder)
    changed = [
        set(command(new, anchors(after, "/s")).argv) ^ set(command(old, anchors(before, "/s")).argv)
        for old, new in zip(before.steps, after.steps, strict=True)
    ]
    assert changed == [{flag}, set(), set()]
    assert command(after.steps[0], anchors(after, "/s")).argv.count(flag) == 1
    assert key.build_key(before) != key.build_key(after)
    assert key.intent_key(before.spec, before.target) != key.intent_key(after.spec, after.target)


@pytest.mark.counts_compiles
def test_debug_cuda_shows_what_each_kernel_takes_even_where_progress_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "op.cu", KERNEL)
    monkeypatch.setenv("OPKILN_CUDA_ARCH_LIST", "8.0;9.0a+PTX")
    monkeypatch.setenv("DS_DEBUG_CUDA", "1")
    load(source, verbose=False)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" registers")[0].rpartition(":")[0] for line in lines] == [
        f"op: void (anonymous namespace)::added<float>(float*) for {arch}"
        for arch in ("sm_80", "sm_90a")
    ]
    assert all(line.endswith(" bytes of shared memory, no spills") for line in lines)
    load(source, verbose=False)
    assert capsys.readouterr().err == "", "it is not compiled again"


def test_ptxas_reports_are_read_kernel_by_kernel() -> None:
    report = """\
ptxas warning : Value of threads per SM for entry _Z5tightPfi is out of range.
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5tightPfi' for 'sm_75'
ptxas info    : Function properties for _Z5tightPfi
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 8 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Function properties for _Z1fi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 2048 bytes smem
"""
    first, second = kernels.read(report)
    assert first == kernels.Kernel("_Z5tightPfi", "sm_75", 64, 0, 16, 24)
    assert str(second) == "plain for sm_90a: 32 registers, 2048 bytes of shared memory, no spills"
    assert str(first).endswith(": 64 registers, 0 bytes of shared memory, "
                               "16 bytes spilled and 24 read back")  # fmt: skip
    assert kernels.read("nothing of the kind\n") == []


# For other build systems


def test_the_extension_names_the_host_compiler_of_the_plan(kernel: Callable[..., Kernel]) -> None:
    builder = kernel()
    found = builder.builder()
    assert found.extra_compile_args.keys() == {"cxx", "nvcc"}
    for_nvcc = found.extra_compile_args["nvcc"]
    assert for_nvcc[:2] == ["-ccbin", planned(builder).toolchain.cxx]
    assert len(for_nvcc) == len(set(for_nvcc))
    assert not [flag for flag in found.extra_compile_args["cxx"] if "gencode" in flag]
    assert "-lcudart_static" in found.extra_link_args
    assert [os.path.basename(path) for path in found.sources] == ["kernel.cu", "host.cpp"]


def test_an_extension_in_an_odd_directory_holds_no_flag_that_a_shell_would_read(
    kernel: Callable[..., Kernel], tmp_path: Path
) -> None:
    for_nvcc = kernel(tmp_path / "a b;c").builder().extra_compile_args["nvcc"]
    assert not [flag for flag in for_nvcc if str(tmp_path) in flag]
    with pytest.raises(SpecError, match="cannot be passed to nvcc"):
        kernel(tmp_path / "a$b").builder()


MODULE = """
#include <Python.h>
#define NAMED(prefix, name) prefix##name
#define INIT(name) NAMED(PyInit_, name)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, nullptr};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""


def test_an_extension_module_is_called_as_setuptools_calls_it(tmp_path: Path) -> None:
    require("setuptools")
    write(tmp_path / "pack" / "module.cpp", MODULE)
    write(
        tmp_path / "pack" / "__init__.py",
        "from opkiln import OpBuilder\n"
        "class ModuleBuilder(OpBuilder):\n"
        "    NAME, KIND, ABI = 'module', 'python', 'none'\n"
        "    def sources(self): return ['module.cpp']\n",
    )
    assert PYTHON == "python"
    code = (
        "import importlib, os, sys\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "from setuptools import setup\n"
        "from pack import ModuleBuilder\n"
        "ModuleBuilder().jit_load(verbose=False)\n"
        "sys.argv = ['setup.py', '-q', 'build_ext', '--build-lib', 'out', '--build-temp', 'temp']\n"
        "setup(name='x', version='1', ext_modules=[ModuleBuilder().builder()])\n"
        "sys.path.insert(0, 'out/pack/ops/module')\n"
        "print(importlib.import_module('module_op').__file__)\n"
    )
    out = child.run(code, path=[tmp_path], bare=False)
    assert out.splitlines()[-1].startswith(str(tmp_path / "out"))
