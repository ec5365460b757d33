"""DeepSpeed's builder classes over opkiln's, for builders of other packages.

    from opkiln.compat.deepspeed import CUDAOpBuilder    # was: from op_builder.builder import …

A class that overrides the usual methods (``sources``, ``include_paths``, ``cxx_args``,
``nvcc_args``, ``extra_ldflags``, ``is_compatible``, ``filter_ccs``, …) needs no change, and its
calls of ``super()`` return lists, as DeepSpeed's do. The result is a pybind module on the full ABI,
built, cached and loaded like every op of opkiln's. Relative paths start at the class's top-level
package.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from opkiln import builder
from opkiln.base.forks import cached_property
from opkiln.base.model import ABI_TORCH, CPU, CUDA, PYTHON, ROCM, OpSpec
from opkiln.machine.devices import amd
from opkiln.machine.toolchain import hipcc, torch_sdk

# The prefixes of flags that a plan sets itself. `-fopenmp` stays in compiles: kernels use it for
# their threads, and torch has already loaded an OpenMP runtime for them. In a link it would load
# the system's runtime as a second one.
_PLANS_CXX = ("-march=", "-mcpu=", "-mtune=", "-shared", "-fPIC")
_PLANS_LINK = ("-fopenmp",)
_CXX = ["-O3", "-std=c++20", "-g", "-Wno-reorder"]
_NVCC = [
    "-O3", "--use_fast_math", "-std=c++20", "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_HALF2_OPERATORS__",
]  # fmt: skip
_BF16 = "-DBF16_AVAILABLE"
_BF16_ON_DEVICE = (
    _BF16, "-U__CUDA_NO_BFLOAT16_OPERATORS__", "-U__CUDA_NO_BFLOAT162_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
)  # fmt: skip


class OpBuilder(builder.OpBuilder):
    """Like DeepSpeed's: C++ sources, on the full ABI."""

    KIND = PYTHON
    ABI = ABI_TORCH
    jit_mode = True

    def include_paths(self) -> Sequence[str]:
        return []

    cxx_args = nvcc_args = extra_ldflags = libraries_args = include_paths

    def spec(self) -> OpSpec:
        spec = super().spec()
        return spec._replace(
            cxx_args=tuple(drop_prefixed(spec.cxx_args, _PLANS_CXX)),
            ldflags=tuple(drop_prefixed(spec.ldflags, _PLANS_LINK)),
        )

    def deepspeed_src_path(self, code_path: str) -> str:
        """The absolute path of a file; a relative path starts at the builder's package."""
        return os.path.join(self.root, code_path)

    def warning(self, message: str) -> None:
        """Print a remark, and keep it in ``error_log``, as DeepSpeed does, and in ``remarks``."""
        self.error_log = message
        if message not in self.remarks:
            self.remarks.append(message)
            sys.stderr.write(f"{self.name}: {message}\n")

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Whether a program is on PATH: one, or any of ``"this|that"``."""
        return super().command_exists(cmd.split("|") if isinstance(cmd, str) else cmd)

    def sycl_extension(self) -> None:
        """Do nothing: authors' setup scripts call it for every op."""

    @staticmethod
    def is_sycl_enabled() -> bool:
        """Whether the program that translates CUDA to SYCL for DeepSpeed, ``c2s``, is on PATH."""
        return shutil.which("c2s") is not None

    is_rocm_pytorch = staticmethod(torch_sdk.is_rocm_pytorch)
    get_rocm_gpu_arch = staticmethod(amd.get_rocm_gpu_arch)
    get_rocm_wavefront_size = staticmethod(amd.get_rocm_wavefront_size)

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """ROCm's release; (0, 0) if torch is not built for it."""
        return hipcc.installed_rocm_version() if torch_sdk.is_rocm_pytorch() else (0, 0)


class CUDAOpBuilder(OpBuilder, builder.CUDAOpBuilder):
    """Like DeepSpeed's: C++ and CUDA sources, on the full ABI. Without a GPU it is built for the
    CPU (``build_for_cpu``), unless its sources are CUDA sources even then."""

    BACKENDS: tuple[str, ...] = (CUDA, ROCM, CPU)

    @cached_property
    def backend(self) -> str:
        """As opkiln's own builders choose it; CUDA or ROCm if the sources are only for those."""
        found: str = super().backend
        if found == CPU and not self._asked_backend:
            self.__dict__["backend"] = CPU  # for sources() that reads build_for_cpu
            if any(os.fspath(source).endswith(".cu") for source in self.sources()):
                return ROCM if self.is_rocm_pytorch() else CUDA
        return found

    @property
    def build_for_cpu(self) -> bool:
        """Whether to build the CPU version. Authors may set it."""
        return self.backend == CPU

    @build_for_cpu.setter
    def build_for_cpu(self, wanted: bool) -> None:
        self.__dict__.pop("backend", None)
        self._asked_backend = CPU if wanted else (ROCM if self.is_rocm_pytorch() else CUDA)

    def cxx_args(self) -> Sequence[str]:
        return list(_CXX)

    def nvcc_args(self) -> Sequence[str]:
        if self.build_for_cpu:
            return []
        if self.backend == ROCM:
            major, minor = self.installed_rocm_version()
            return ["-O3", "-std=c++17", f"-DROCM_VERSION_MAJOR={major}",
                    f"-DROCM_VERSION_MINOR={minor}"]  # fmt: skip
        return list(_NVCC)

    def filter_ccs(self, ccs: list[str]) -> Sequence[Any]:
        """All of them, as ``[major, minor]``: the form that DeepSpeed passes to overrides."""
        return [cc.split(".") for cc in ccs]

    def spec(self) -> OpSpec:
        spec = super().spec()
        if self.backend == CPU or not self.enable_bf16:
            return spec
        return spec._replace(
            cxx_args=(*spec.cxx_args, _BF16), device_args=(*spec.device_args, *_BF16_ON_DEVICE)
        )

    def cuda_capability_major(self) -> int | None:
        """The lowest major capability of this machine's GPUs, or None. Creates no CUDA context."""
        from opkiln.decision import archs
        from opkiln.machine.devices import nvidia

        found = nvidia.capabilities(nvidia.devices(archs.memory()))
        return int(found[0].partition(".")[0]) if found else None


class CPUOpBuilder(OpBuilder):
    """Like DeepSpeed's: C++ for the CPU, with its vector instructions and with OpenMP pragmas.
    These run on torch's own threads."""

    def cxx_args(self) -> Sequence[str]:
        return [*_CXX, self.cpu_arch(), "-fopenmp", self.simd_width()]


class TorchCPUOpBuilder(CPUOpBuilder):
    """The name that ``CPUOpBuilder`` had in earlier releases of DeepSpeed."""


def drop_prefixed(flags: Iterable[str], prefixes: tuple[str, ...]) -> list[str]:
    """The flags that begin with none of these."""
    return [flag for flag in flags if not flag.startswith(prefixes)]


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """The release of the CUDA toolkit that a build here would use. Raises MissingCUDAException."""
    found: tuple[int, int] = _ask_toolkits("installed_cuda_version", name)
    return found


def assert_no_cuda_mismatch(name: str = "") -> bool:
    """True if a CUDA toolkit fits torch. Raises CUDAMismatchException, MissingCUDAException."""
    return bool(_ask_toolkits("assert_no_cuda_mismatch", name))


def get_default_compute_capabilities() -> str:
    """Every architecture that the CUDA toolkit here knows."""
    return str(_ask_toolkits("get_default_compute_capabilities"))


def _ask_toolkits(question: str, *names: str) -> Any:
    from opkiln.decision import archs
    from opkiln.machine.toolchain import cuda_version

    return getattr(cuda_version, question)(*names, memory=archs.memory())


def probe_is_compatible(builder: Any, verbose: bool = False) -> bool:
    """``builder.is_compatible(verbose)``. If that raises, prints the reason and returns False."""
    try:
        return bool(builder.is_compatible(verbose))
    except Exception as error:
        sys.stderr.write(f"{builder.name}: is_compatible() fails: {error}\n")
        return False
