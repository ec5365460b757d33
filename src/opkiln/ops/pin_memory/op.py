"""Page-locked host memory: buffers that devices and direct I/O reach without a copy."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder
from opkiln.builder.library import library


class PinMemoryBuilder(CUDAOpBuilder):
    NAME = "pin_memory"
    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    BACKENDS = ("cuda", "rocm", "cpu")

    @classmethod
    def emulates(cls) -> bool:
        """There is no kernel that the emulator could run."""
        return False

    def sources(self) -> list[str]:
        return ["ops/pin_memory/cpu.cpp" if self.build_for_cpu else "ops/pin_memory/cuda.cu"]


kit = library(PinMemoryBuilder, functions="opkiln.ops.pin_memory.functions")
