"""Lists of tensors as one flat tensor and back. The name is the one that DeepSpeed's users know."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder
from opkiln.builder.library import library


class UtilsBuilder(CUDAOpBuilder):
    NAME = "utils"
    BUILD_VAR = "DS_BUILD_UTILS"
    BACKENDS = ("cuda", "rocm", "cpu")

    def sources(self) -> list[str]:
        return ["ops/utils/cpu.cpp" if self.build_for_cpu else "ops/utils/cuda.cu"]


kit = library(UtilsBuilder, functions="opkiln.ops.utils.functions")
