"""Builders written against DeepSpeed's classes, with nothing but their import changed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from sample import child
from sample.levels import IS_X86

from opkiln.base.model import ABI_TORCH, CPU, CUDA, PYTHON
from opkiln.building.asking import plan_here
from opkiln.compat.deepspeed import CPUOpBuilder, CUDAOpBuilder, OpBuilder, TorchCPUOpBuilder
from opkiln.compat.deepspeed.builders import probe_is_compatible
from opkiln.decision.terms import BUILD, Request
from opkiln.machine.toolchain import nvcc
from opkiln.plan import plan as plans
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path

# A pybind module would be the usual thing, and takes half a minute to compile; this is a module.
MODULE = """
#include <Python.h>
#include "width.h"
static PyObject* width(PyObject*, PyObject*) { return PyLong_FromLong(WIDTH + OFFSET); }
static PyMethodDef methods[] = {{"width", width, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "outer", "", -1, methods};
PyMODINIT_FUNC PyInit_outer() { return PyModule_Create(&module); }
"""
WIDTH = """
#if defined(__AVX512__)
#define WIDTH 512
#elif defined(__AVX256__)
#define WIDTH 256
#else
#define WIDTH 1
#endif
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "csrc" / "includes").mkdir(parents=True)
    (tmp_path / "csrc" / "outer.cpp").write_text(MODULE)
    (tmp_path / "csrc" / "includes" / "width.h").write_text(WIDTH)
    (tmp_path / "csrc" / "kernel.cu").write_text("__global__ void kernel() {}\n")
    return tmp_path


def _argv(builder: Any) -> list[list[str]]:
    op = builder.op()
    plan = plan_here(Request(op, BUILD))
    return [list(plans.command(step, plans.anchors(plan, "/stage")).argv) for step in plan.steps]


def _host_builder(tree: Path) -> Any:
    class OuterBuilder(CPUOpBuilder):
        BUILD_VAR = "DS_BUILD_OUTER"
        NAME = "outer"

        def __init__(self) -> None:
            super().__init__(name=self.NAME)

        def absolute_name(self) -> str:
            return f"elsewhere.ops.{self.NAME}_op"

        def sources(self) -> list[str]:
            return [self.deepspeed_src_path(str(tree / "csrc" / "outer.cpp"))]

        def include_paths(self) -> list[str]:
            return ["", str(tree / "csrc" / "includes")]

        def cxx_args(self) -> list[str]:
            args = super().cxx_args()
            args += ["-DOFFSET=3", ""]
            return list(args)

        def extra_ldflags(self) -> list[str]:
            return ["-fopenmp", "-lm"]

        def is_compatible(self, verbose: bool = False) -> bool:
            return super().is_compatible(verbose) and self.has_function("cos", ("m",))

    return OuterBuilder()


def test_a_builder_for_the_cpu_builds_and_loads_a_module(tree: Path) -> None:
    if not IS_X86:
        pytest.skip("DeepSpeed's macros for vectors are those of x86 here")
    builder = _host_builder(tree)
    assert builder.name == "outer"
    assert builder.absolute_name() == "elsewhere.ops.outer_op"
    assert builder.is_compatible(verbose=True), builder.error_log
    module = builder.load(verbose=False)
    widths = {"-D__AVX512__": 512, "-D__AVX256__": 256, "-D__SCALAR__": 1}
    assert module.width() == widths[builder.simd_width()] + 3
    assert _host_builder(tree).jit_load(verbose=False) is module


def test_flags_that_the_plan_owns_are_not_given_twice(tree: Path) -> None:
    builder = _host_builder(tree)
    spec = builder.spec()
    assert (spec.kind, spec.abi) == (PYTHON, ABI_TORCH)
    assert not [flag for flag in spec.cxx_args if flag.startswith("-march")]
    assert "-fopenmp" in spec.cxx_args, "its pragmas hold"
    assert spec.ldflags == ("-lm",), "no second OpenMP runtime"
    compiling, linking = _argv(builder)
    assert sum(word.startswith("-march=") for word in compiling) <= 1
    assert "-fopenmp" not in linking


def test_what_authors_call_through_super_gives_lists() -> None:
    class Bare(OpBuilder):
        NAME = "bare"

    class OnDevice(CUDAOpBuilder):
        NAME = "on_device"

        def sources(self) -> list[str]:
            return ["kernel.cu"]

    for builder in (Bare(), OnDevice("on_device", backend="cuda")):
        for name in ("include_paths", "cxx_args", "nvcc_args", "extra_ldflags", "libraries_args"):
            assert isinstance(getattr(builder, name)(), list), name
        assert builder.strip_empty_entries(["", "a"]) == ["a"]
        assert builder.hipify_extension() == []
        assert builder.sycl_extension() is None
        assert builder.is_rocm_pytorch() is False
        assert builder.deepspeed_src_path("/absolute") == "/absolute"
        assert builder.deepspeed_src_path("x.cpp") == os.path.join(builder.root, "x.cpp")


def test_a_remark_is_kept_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    for builder in (OpBuilder("x"), CUDAOpBuilder("x", backend="cuda")):
        builder.warning("Filtered compute capabilities")
        builder.warning("Filtered compute capabilities")
        assert builder.error_log == "Filtered compute capabilities"
        assert capsys.readouterr().err == "x: Filtered compute capabilities\n"


def test_one_of_several_commands_is_enough() -> None:
    for builder in (OpBuilder("x"), CUDAOpBuilder("x", backend="cuda")):
        assert builder.command_exists("no-such-command|sh")
        assert not builder.command_exists("no-such-command|nor-this")
        assert builder.error_log == "no-such-command or nor-this is not on PATH"


def _device_builder(tree: Path) -> Any:
    class AmpereBuilder(CUDAOpBuilder):
        BUILD_VAR = "DS_BUILD_AMPERE"
        NAME = "ampere"

        def __init__(self, name: str | None = None) -> None:
            name = self.NAME if name is None else name
            super().__init__(name=name)

        def absolute_name(self) -> str:
            return f"elsewhere.ops.{self.NAME}_op"

        def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
            retained, pruned = [], []
            for cc in [cc.split(".") for cc in ccs]:
                (retained if int(cc[0]) >= 8 else pruned).append(cc)
            if pruned:
                self.warning(f"Filtered compute capabilities {pruned}")
            return retained

        def sources(self) -> list[str]:
            return [str(tree / "csrc" / "kernel.cu"), str(tree / "csrc" / "outer.cpp")]

        def include_paths(self) -> list[str]:
            return [str(tree / "csrc" / "includes")]

        def cxx_args(self) -> list[str]:
            return [*super().cxx_args(), *self.version_dependent_macros()]

        def nvcc_args(self) -> list[str]:
            return [*super().nvcc_args(), "-lineinfo", "--threads=8",
                    *self.compute_capability_args()]  # fmt: skip

        def extra_ldflags(self) -> list[str]:
            return [] if self.is_rocm_pytorch() else ["-lcurand"]

    return AmpereBuilder()


def test_a_builder_for_gpus_takes_9_0a_and_its_filter_holds(tree: Path) -> None:
    if not nvcc.available():
        pytest.skip("no nvcc on this machine")
    with override(cuda_arch_list="7.5;9.0a"):
        builder = _device_builder(tree)
        assert builder.backend == CUDA, "its sources are CUDA's"
        assert not builder.build_for_cpu
        device, host, linking = _argv(builder)
    gencode = [word for word in device if word.startswith("-gencode")]
    assert gencode == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert not [word for word in device if word == "--threads=8"]
    assert "-lineinfo" in device
    assert "-DBF16_AVAILABLE" in device
    assert "-DBF16_AVAILABLE" in host
    assert "-U__CUDA_NO_BFLOAT16_CONVERSIONS__" in device
    assert "-DVERSION_GE_1_5" in host
    assert "-lcurand" in linking


def test_bfloat16_is_left_out_where_an_architecture_lacks_it(tree: Path) -> None:
    if not nvcc.available():
        pytest.skip("no nvcc on this machine")

    class Any75(type(_device_builder(tree))):  # type: ignore[misc]
        def filter_ccs(self, ccs: list[str]) -> Any:
            return CUDAOpBuilder.filter_ccs(self, ccs)

    with override(cuda_arch_list="7.5;9.0"):
        device, host, _ = _argv(Any75())
    assert "-DBF16_AVAILABLE" not in [*device, *host]


def test_authors_may_say_that_it_is_built_for_the_cpu(tree: Path) -> None:
    class Either(CUDAOpBuilder):
        NAME = "either"

        def sources(self) -> list[str]:
            return ["cpu.cpp"] if self.build_for_cpu else ["cuda.cu"]

    builder = Either()
    builder.build_for_cpu = True
    assert builder.backend == CPU
    assert builder.spec().sources == ("cpu.cpp",)
    assert builder.nvcc_args() == []
    builder.build_for_cpu = False
    assert builder.backend == CUDA
    assert builder.spec().sources == ("cuda.cu",)


# What files with builders import from DeepSpeed 0.19.8's op_builder.builder and op_builder.cpu.
NAMES = (
    "OpBuilder", "CUDAOpBuilder", "CPUOpBuilder", "MissingCUDAException", "CUDAMismatchException",
    "installed_cuda_version", "assert_no_cuda_mismatch", "get_default_compute_capabilities",
    "probe_is_compatible",
)  # fmt: skip
METHODS = (
    "absolute_name", "builder", "command_exists", "cpu_arch", "cxx_args", "deepspeed_src_path",
    "extra_ldflags", "get_rocm_gpu_arch", "get_rocm_wavefront_size", "has_function",
    "hipify_extension", "include_paths", "installed_rocm_version", "is_compatible",
    "is_rocm_pytorch", "is_sycl_enabled", "jit_load", "libraries_args", "load", "nvcc_args",
    "simd_width", "sources", "strip_empty_entries", "sycl_extension", "warning",
)  # fmt: skip


def test_every_name_that_a_file_of_builders_imports_is_there() -> None:
    import opkiln.compat.deepspeed as package

    assert [name for name in NAMES if not hasattr(package, name)] == []
    for kind in (OpBuilder, CUDAOpBuilder, CPUOpBuilder):
        assert [name for name in METHODS if not callable(getattr(kind, name, None))] == []
    assert issubclass(TorchCPUOpBuilder, CPUOpBuilder)


def test_a_probe_that_raises_says_so_and_is_not_compatible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken(OpBuilder):
        NAME = "broken"

        def is_compatible(self, verbose: bool = False) -> bool:
            raise OSError("no toolkit")

    assert not probe_is_compatible(Broken("broken"))
    assert "broken: is_compatible() fails: no toolkit" in capsys.readouterr().err


def test_the_engine_has_torchs_module_of_extensions_imported_for_builders() -> None:
    """DeepSpeed's ``load`` imports it, so that its builder ``dc`` reads it without an import."""
    program = """
import sys
from opkiln.compat.deepspeed import engine

class Builder:
    name, jit_mode, enable_bf16, error_log = "dc", False, False, None
    def sources(self): return ["csrc/dc.cpp"]
    def include_paths(self):
        import os, torch
        return [os.path.join(torch.utils.cpp_extension.CUDA_HOME, "include")]
    def cxx_args(self): return []
    def nvcc_args(self): return []
    def extra_ldflags(self): return []
    def filter_ccs(self, ccs): return ccs
    def is_rocm_pytorch(self): return False
    def strip_empty_entries(self, entries): return [each for each in entries if each]
    def deepspeed_src_path(self, path):
        import os
        return os.path.join("/opt/tree", path)

import torch
torch.cuda.is_available = lambda: True  # a machine with a GPU
assert "torch.utils.cpp_extension" not in sys.modules
spec = engine.op_of(Builder()).spec
print(*spec.include_dirs)
before = torch.utils.cpp_extension.CUDA_HOME
assert engine.op_of(Builder()).spec == spec
assert torch.utils.cpp_extension.CUDA_HOME == before
"""
    said = child.run(program, bare=False, env={"OPKILN_CUDA_HOME": "/opt/cuda-13"})
    assert said == "/opt/cuda-13/include\n"


def test_importing_the_package_does_no_work_and_knows_no_deepspeed() -> None:
    import opkiln.compat.deepspeed as package

    assert "deepspeed" not in sys.modules
    assert set(dir(package)) >= {"OpBuilder", "CUDAOpBuilder", "TorchCPUOpBuilder", "install"}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018 (asking is what is tested)
