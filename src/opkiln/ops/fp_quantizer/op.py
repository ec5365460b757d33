"""Group-wise quantization to narrow floating-point numbers: fp8, fp6, fp12, fp4."""

from __future__ import annotations

from opkiln.base.model import CUDA
from opkiln.builder import CUDAOpBuilder
from opkiln.builder.library import library


class FPQuantizerBuilder(CUDAOpBuilder):
    NAME = "fp_quantizer"
    BUILD_VAR = "DS_BUILD_FP_QUANTIZER"
    BACKENDS = ("cuda", "rocm", "cpu")

    def sources(self) -> list[str]:
        if self.build_for_cpu:
            return ["ops/fp_quantizer/cpu.cpp"]
        return ["ops/fp_quantizer/quantize.cu", "ops/fp_quantizer/dequantize.cu"]

    def nvcc_args(self) -> list[str]:
        # -O is of the host's code, which makes checks and launches.
        return ["-O1"] if self.backend == CUDA else []

    def filter_ccs(self, ccs: list[str]) -> list[str]:
        """8.0 and later: earlier GPUs have no maximum that keeps NaN."""
        return [each for each in ccs if int(each.partition(".")[0]) >= 8]


kit = library(FPQuantizerBuilder, functions="opkiln.ops.fp_quantizer.functions")
