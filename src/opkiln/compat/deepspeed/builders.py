"""DeepSpeed's builder classes over opkiln's: for builders written against them, elsewhere.

    from opkiln.compat.deepspeed import CUDAOpBuilder    # was: from op_builder.builder import …

A class that overrides the usual methods (``sources``, ``include_paths``, ``cxx_args``,
``nvcc_args``, ``extra_ldflags``, ``is_compatible``, ``filter_ccs``, …) stays as it is, calls of
``super()`` included: those give lists, as DeepSpeed's do. What it makes is a pybind module on the
full ABI, loaded, built and cached as every op of opkiln's. Relative paths start at the class's
top-level package.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import cached_property
from typing import Any

from opkiln import builder
from opkiln.model import ABI_TORCH, CPU, CUDA, PYTHON, ROCM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from opkiln.model import OpSpec

# What DeepSpeed has its authors put there, and the plan sets itself.
_PLANS_CXX = ("-march=", "-mcpu=", "-mtune=")
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
    """As DeepSpeed's: C++ sources, on the full ABI."""

    KIND = PYTHON
    ABI = ABI_TORCH
    jit_mode = True

    def include_paths(self) -> Sequence[str]:
        return []

    def cxx_args(self) -> Sequence[str]:
        return []

    def nvcc_args(self) -> Sequence[str]:
        """Flags for nvcc; a builder without device code has none."""
        return []

    def extra_ldflags(self) -> Sequence[str]:
        return []

    def libraries_args(self) -> Sequence[str]:
        return []

    def spec(self) -> OpSpec:
        return _less_the_plans(super().spec())

    def deepspeed_src_path(self, code_path: str) -> str:
        """A path of a source or header, absolute; relative ones start at the builder's package."""
        return os.path.join(self.root, code_path)

    def warning(self, message: str) -> None:
        """Keep a remark in ``error_log``, as DeepSpeed does, and in ``remarks``; and print it."""
        _warn(self, message)

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Whether a program is on PATH: one, or any of ``"this|that"``."""
        return super().command_exists(cmd.split("|") if isinstance(cmd, str) else cmd)

    def sycl_extension(self) -> None:
        """Nothing to be done: authors' setup scripts call it for every op."""

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether the torch that is installed is built for ROCm."""
        from opkiln.toolchain.rocm import is_rocm_pytorch

        return is_rocm_pytorch()

    @staticmethod
    def is_sycl_enabled() -> bool:
        """Whether the program that translates CUDA to SYCL for DeepSpeed, ``c2s``, is on PATH."""
        return shutil.which("c2s") is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """ROCm's release; (0, 0) where torch is not built for it."""
        from opkiln.toolchain.rocm import installed_rocm_version, is_rocm_pytorch

        return installed_rocm_version() if is_rocm_pytorch() else (0, 0)

    @staticmethod
    def get_rocm_gpu_arch() -> str:
        """The first AMD GPU's architecture, or nothing."""
        from opkiln.accelerator.amd import get_rocm_gpu_arch

        return get_rocm_gpu_arch()

    @staticmethod
    def get_rocm_wavefront_size() -> str:
        """The first AMD GPU's, or 32."""
        from opkiln.accelerator.amd import get_rocm_wavefront_size

        return get_rocm_wavefront_size()


class CUDAOpBuilder(builder.CUDAOpBuilder):
    """As DeepSpeed's: C++ and CUDA sources, on the full ABI. Where there is no GPU it is built for
    the CPU (``build_for_cpu``), unless its sources are CUDA's even then."""

    KIND = PYTHON
    ABI = ABI_TORCH
    BACKENDS: tuple[str, ...] = (CUDA, ROCM, CPU)
    jit_mode = True

    @cached_property
    def backend(self) -> str:
        """As opkiln's own; and that of the sources, where those are CUDA's alone."""
        found: str = super().backend
        if found == CPU and not self._asked_backend:
            self.__dict__["backend"] = CPU  # for sources() that look at build_for_cpu
            if any(os.fspath(source).endswith(".cu") for source in self.sources()):
                return ROCM if self.is_rocm_pytorch() else CUDA
        return found

    @property
    def build_for_cpu(self) -> bool:
        """Whether the CPU version is what is to be built. Authors may say so themselves."""
        return self.backend == CPU

    @build_for_cpu.setter
    def build_for_cpu(self, wanted: bool) -> None:
        self.__dict__.pop("backend", None)
        self._asked_backend = CPU if wanted else (ROCM if self.is_rocm_pytorch() else CUDA)

    def include_paths(self) -> Sequence[str]:
        return []

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

    def extra_ldflags(self) -> Sequence[str]:
        return []

    def libraries_args(self) -> Sequence[str]:
        return []

    def filter_ccs(self, ccs: list[str]) -> Sequence[Any]:
        """All of them, as ``[major, minor]``: what DeepSpeed's gives to those that override it."""
        return [cc.split(".") for cc in ccs]

    def spec(self) -> OpSpec:
        spec = _less_the_plans(super().spec())
        if self.backend == CPU or not self.enable_bf16:
            return spec
        on_device = _BF16_ON_DEVICE if self.backend == CUDA else (_BF16,)
        return spec._replace(
            cxx_args=(*spec.cxx_args, _BF16), device_args=(*spec.device_args, *on_device)
        )

    def cuda_capability_major(self) -> int | None:
        """The lowest major capability of the GPUs here, asked without a context; None: there are
        none."""
        from opkiln.accelerator import nvidia
        from opkiln.loading import archs

        found = nvidia.capabilities(nvidia.devices(archs.memory()))
        return int(found[0].partition(".")[0]) if found else None

    deepspeed_src_path = OpBuilder.deepspeed_src_path
    sycl_extension = OpBuilder.sycl_extension
    is_sycl_enabled = staticmethod(OpBuilder.is_sycl_enabled)

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Whether a program is on PATH: one, or any of ``"this|that"``."""
        return super().command_exists(cmd.split("|") if isinstance(cmd, str) else cmd)

    def warning(self, message: str) -> None:
        """Keep a remark in ``error_log``, as DeepSpeed does, and in ``remarks``; and print it."""
        _warn(self, message)


class CPUOpBuilder(OpBuilder):
    """As DeepSpeed's: C++ for the CPU, with its vectors and OpenMP's pragmas, which torch's own
    threads serve."""

    def cxx_args(self) -> Sequence[str]:
        return [*_CXX, self.cpu_arch(), "-fopenmp", self.simd_width()]


class TorchCPUOpBuilder(CPUOpBuilder):
    """The name that ``CPUOpBuilder`` had in earlier releases of DeepSpeed."""


def installed_cuda_version(name: str = "") -> tuple[int, int]:
    """The release of the CUDA toolkit that a build here would use. Raises MissingCUDAException."""
    from opkiln.loading import archs
    from opkiln.toolchain import cuda_version

    return cuda_version.installed_cuda_version(name, memory=archs.memory())


def assert_no_cuda_mismatch(name: str = "") -> bool:
    """True where a CUDA toolkit fits torch. Raises CUDAMismatchException, MissingCUDAException."""
    from opkiln.loading import archs
    from opkiln.toolchain import cuda_version

    return cuda_version.assert_no_cuda_mismatch(name, memory=archs.memory())


def get_default_compute_capabilities() -> str:
    """Every architecture that the toolkit here has."""
    from opkiln.loading import archs
    from opkiln.toolchain import cuda_version

    return cuda_version.get_default_compute_capabilities(memory=archs.memory())


def probe_is_compatible(builder: Any, verbose: bool = False) -> bool:
    """``builder.is_compatible(verbose)``; False, with a line that says why, where that raises."""
    try:
        return bool(builder.is_compatible(verbose))
    except Exception as error:
        sys.stderr.write(f"{builder.name}: is_compatible() fails: {error}\n")
        return False


def _less_the_plans(spec: OpSpec) -> OpSpec:
    # A link with -fopenmp would bring a second OpenMP runtime beside torch's.
    return spec._replace(
        cxx_args=tuple(flag for flag in spec.cxx_args if not flag.startswith(_PLANS_CXX)),
        ldflags=tuple(flag for flag in spec.ldflags if flag != "-fopenmp"),
    )


def _warn(op: builder.OpBuilder, message: str) -> None:
    op.error_log = message
    if message not in op.remarks:
        op.remarks.append(message)
        sys.stderr.write(f"{op.name}: {message}\n")
