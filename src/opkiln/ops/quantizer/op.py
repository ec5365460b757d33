"""Group-wise int8 and int4 quantization, and the reduction of quantized parts."""

from __future__ import annotations

from opkiln.base.model import CPU, EMULATED, ROCM
from opkiln.builder import CUDAOpBuilder
from opkiln.builder.library import library


class QuantizerBuilder(CUDAOpBuilder):
    NAME = "quantizer"
    BUILD_VAR = "DS_BUILD_QUANTIZER"
    BACKENDS = ("cuda", "rocm", "cpu")

    def sources(self) -> list[str]:
        if self.build_for_cpu:
            return ["ops/quantizer/cpu.cpp"]
        # Two, because a first use waits for both: they are compiled side by side.
        return ["ops/quantizer/cuda.cu", "ops/quantizer/cuda_float.cu"]

    # A product that is rounded before it is added to gives the bits of the reference; compilers
    # would rather round once.
    def cxx_args(self) -> list[str]:
        plain = self.backend in (CPU, EMULATED)
        return ["-ffp-contract=off", "-fno-trapping-math"] if plain else []

    def nvcc_args(self) -> list[str]:
        # -O is of the host's code, which makes checks and launches.
        return ["-ffp-contract=off"] if self.backend == ROCM else ["-fmad=false", "-O1"]


kit = library(QuantizerBuilder, functions="opkiln.ops.quantizer.functions")
