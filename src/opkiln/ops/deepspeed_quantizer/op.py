"""The library of ``deepspeed_quantizer``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.base.model import CPU, EMULATED, ROCM
from opkiln.builder import CUDAOpBuilder
from opkiln.builder.library import library


class DeepSpeedQuantizerBuilder(CUDAOpBuilder):
    NAME = "deepspeed_quantizer"
    BUILD_VAR = "DS_BUILD_DEEPSPEED_QUANTIZER"
    BACKENDS = ("cuda", "rocm", "cpu")

    def sources(self) -> list[str]:
        file = "cpu.cpp" if self.build_for_cpu else "cuda.cu"
        return [f"ops/deepspeed_quantizer/{file}"]

    # A product is rounded before it is rounded to a level. The one sum that DeepSpeed's compiler
    # fuses with its product is written as such.
    def cxx_args(self) -> list[str]:
        plain = self.backend in (CPU, EMULATED)
        return ["-ffp-contract=off", "-fno-trapping-math"] if plain else []

    def nvcc_args(self) -> list[str]:
        # -O is of the host's code, which makes checks and launches.
        return ["-ffp-contract=off"] if self.backend == ROCM else ["-fmad=false", "-O1"]


kit = library(DeepSpeedQuantizerBuilder, functions="opkiln.ops.deepspeed_quantizer.functions")
