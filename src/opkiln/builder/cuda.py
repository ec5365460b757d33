"""CUDAOpBuilder: an op with device code for CUDA, for ROCm from the same sources, and for the CPU.

``BACKENDS`` says for which of these the op has sources; ``backend`` is the one that this builder
serves. One library holds one backend.
"""

from __future__ import annotations

import os
import sys

from opkiln.base.forks import cached_property
from opkiln.base.model import CPU, CUDA, EMULATED, EMULATOR_RUNTIME, ROCM, OpSpec
from opkiln.builder.base import OpBuilder, torch_built_for
from opkiln.errors import LoadError, ToolchainError
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from opkiln.base.model import Op


class CUDAOpBuilder(OpBuilder):
    """What authors of device code subclass.

    ``sources()`` lists ``.cu`` and ``.cpp`` files; where ``build_for_cpu`` is true, the C++ files
    of the CPU version instead. ``filter_ccs()`` leaves architectures out. Kernels that include no
    torch header compile in a fraction of the time: put the binding into a ``.cpp``.
    """

    BACKENDS: tuple[str, ...] = (CUDA, ROCM)

    # What an author declares

    def nvcc_args(self) -> Sequence[str]:
        """Flags for nvcc or hipcc; they come after opkiln's own. Architectures are not among them:
        what ``compute_capability_args()`` gives is left out, anything else like it is refused."""
        return ()

    def filter_ccs(self, ccs: list[str]) -> Sequence[Any]:
        """Those of the capabilities ("8.0", "9.0") that the op can be built for.

        One that is left out stays out, with all its variants (``9.0a``, ``+PTX``); a filter cannot
        add. The answer is strings, or ``[major, minor]`` pairs.
        """
        return ccs

    # What follows from it

    @cached_property
    def backend(self) -> str:
        """The backend that is asked for; else ``emulated``, if ``emulates()``; else that of the
        accelerator that is; else the first of
        ``BACKENDS`` with a device here that torch can use; else the CPU, where the op has a CPU
        version. Raises AcceleratorError where the accelerator that is asked for does not exist."""
        if self._asked_backend:
            return self._asked_backend
        if self.emulates():
            return EMULATED
        cuda, hip = torch_built_for()
        usable = tuple(each for each in self.BACKENDS if each != (CUDA if hip else ROCM))
        if asked := _asked_backend(usable):
            return asked
        torch_has = cuda or hip
        for each in usable:
            if each == CPU or (torch_has and _has_device(each)):
                return each
        return usable[0] if usable else self.BACKENDS[0]

    @property
    def build_for_cpu(self) -> bool:
        """Whether the CPU version is what is to be built."""
        return self.backend == CPU

    @property
    def enable_bf16(self) -> bool:
        """Whether every architecture that the filter left has bfloat16 arithmetic."""
        if self.backend != CUDA:
            return self.backend in (ROCM, EMULATED)
        from opkiln.decision import archs
        from opkiln.machine.arch import cuda

        try:
            return cuda.has_bf16(cuda.parse(";".join(archs.find_wanted(self._bare()).archs)))
        except (LoadError, ToolchainError):
            return False  # there is nothing to build for; whoever loads is told

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """The ``-gencode`` flags (``--offload-arch`` on ROCm) for these architectures, or those
        wanted here, less what the filter removes; each once. Without a list or a device: every one
        that this nvcc has.

        The plan adds them itself; they are here for other build systems.
        """
        from opkiln.decision import archs

        if self.backend in (CPU, EMULATED):
            return []
        op = self._bare()._replace(asked=cross_compile_archs or self._asked_archs)
        if not op.asked and archs.lacks_targets(self.backend):
            op = op._replace(asked="all")
        language = archs.grammar(self.backend)
        try:
            wanted = archs.find_wanted(op).archs
        except (LoadError, ToolchainError):
            if cross_compile_archs:
                raise
            return []  # there is nothing to build for, or with; whoever builds is told
        return list(language.flags(language.parse(";".join(wanted))))

    def spec(self) -> OpSpec:
        spec = super().spec()
        if self.backend == CPU:
            return spec
        if self.backend == EMULATED:
            return self._emulate(spec)
        # The host's part of a device library only launches kernels: it fits every CPU. The CUDA
        # runtime is linked statically; a second, shared one would have to be there when it loads.
        runtimes = ("cudart", "cudart_static") if self.backend == CUDA else ()
        return spec._replace(
            backend=self.backend,
            device_args=self._device_args(),
            vectorize=False,
            libraries=tuple(name for name in spec.libraries if name not in runtimes),
        )

    def _emulate(self, spec: OpSpec) -> OpSpec:
        """The CUDA sources as a library for the CPU, with the emulator's runtime."""
        shared = ("-D", "-U", "-I", "-std")  # flags that mean the same to nvcc and to g++
        flags = [flag for flag in self._device_args() if flag.startswith(shared)]
        return spec._replace(
            emulated=True,
            vectorize=False,
            sources=(*spec.sources, EMULATOR_RUNTIME),
            cxx_args=(*spec.cxx_args, *flags),
        )

    def hipify_extension(self, directory: str = os.path.join("build", "hip")) -> list[str]:
        """For ROCm: translate the sources into a copy below ``directory``, which ``builder()`` then
        compiles; the copies of the sources. The author's own files stay as they are.

        Loading needs no call: a build translates what it compiles, in its own directory.
        Raises SpecError, ToolchainError where torch's hipify cannot be used, OSError.
        """
        if self.backend != ROCM:
            return []
        import shutil

        from opkiln.machine.toolchain import staged_copy, torch_sdk

        sdk, spec = torch_sdk.find(), self.spec()
        if sdk is None:
            raise ToolchainError(
                f"op {self.name} cannot be translated to HIP",
                why="torch's hipify does that, and torch is not installed",
                hint="pip install torch",
            )
        place = os.path.abspath(os.path.join(directory, self.name))
        shutil.rmtree(place, ignore_errors=True)  # of a call before; the sources may be others
        os.makedirs(place)
        staged = staged_copy.stage_hip(spec, sdk, place)
        self._translated = spec._replace(
            root=staged.root,
            sources=tuple(staged.sources.values()),
            include_dirs=tuple(staged.include_dirs.values()),
        )
        return [os.path.join(staged.root, source) for source in staged.sources.values()]

    def _device_args(self) -> tuple[str, ...]:
        given = self.strip_empty_entries(self.nvcc_args())
        # What other systems have authors put here and the plan chooses itself: authors who hand it
        # on are not to be sent away for it.
        own: set[str] = set()
        if any(flag.startswith(("-gencode", "--offload-arch")) for flag in given):
            own = set(self.compute_capability_args())
        return tuple(
            flag for flag in given if flag not in own and not flag.startswith("--threads=")
        )

    def op(self) -> Op:
        op = super().op()
        if self.backend in (CPU, EMULATED):
            return op
        return op._replace(rule=self._rule(), asked=self._asked_archs)

    def _rule(self) -> Any:
        filters = type(self).filter_ccs is not CUDAOpBuilder.filter_ccs
        return self.filter_ccs if filters and self.backend == CUDA else None

    def _bare(self) -> Op:
        """The op as far as its architectures go, without asking for its sources and flags."""
        from opkiln.base.model import Op

        spec = OpSpec(self.name, self.distribution, self.root, (), backend=self.backend)
        return Op(spec, rule=self._rule(), asked=self._asked_archs)

    # What authors ask the machine

    def is_rocm_pytorch(self) -> bool:
        """Whether the torch that is installed is built for ROCm."""
        from opkiln.machine.toolchain.torch_sdk import is_rocm_pytorch

        return is_rocm_pytorch()

    def installed_rocm_version(self) -> tuple[int, int]:
        """(major, minor) of the ROCm installation that would be used. Raises ToolchainError."""
        from opkiln.machine.toolchain.hipcc import installed_rocm_version

        return installed_rocm_version()

    def get_rocm_gpu_arch(self) -> str:
        """The architectures of all AMD GPUs here, separated by ``;``."""
        from opkiln.machine.devices.amd import get_rocm_gpu_arch

        return get_rocm_gpu_arch()

    def get_rocm_wavefront_size(self) -> str:
        """The wavefront size of the AMD GPUs here, as text."""
        from opkiln.machine.devices.amd import get_rocm_wavefront_size

        return get_rocm_wavefront_size()


def _asked_backend(usable: tuple[str, ...]) -> str | None:
    # set_accelerator imports this module. If it was not called and no setting names an accelerator,
    # a hit need not import it.
    if settings.accelerator is None and "opkiln.machine.devices.choice" not in sys.modules:
        return None
    from opkiln.machine.devices import choice

    return choice.requested_backend(usable)


def _has_device(backend: str) -> bool:
    from opkiln.decision import archs  # not where the CPU is all there is

    return archs.may_use_device(backend)
