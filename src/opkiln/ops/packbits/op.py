"""Sign bits of tensors, eight to a byte."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder
from opkiln.builder.library import library


class PackbitsBuilder(CUDAOpBuilder):
    NAME = "packbits"
    BUILD_VAR = "DS_BUILD_PACK_BITS"
    BACKENDS = ("cuda", "rocm", "cpu")

    def sources(self) -> list[str]:
        return ["ops/packbits/cpu.cpp" if self.build_for_cpu else "ops/packbits/cuda.cu"]


kit = library(PackbitsBuilder, functions="opkiln.ops.packbits.functions")
