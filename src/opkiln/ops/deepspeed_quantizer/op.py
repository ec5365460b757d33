"""DeepSpeed's int8 and int4 quantizer: its layout, its levels and its scales."""

from __future__ import annotations

from opkiln.builder.library import library
from opkiln.ops.quantizer.op import QuantizerBuilder


class DeepSpeedQuantizerBuilder(QuantizerBuilder):
    # As in quantizer, a product is rounded before it is rounded to a level. The one sum that
    # DeepSpeed's compiler fuses with its product is written as such.
    NAME = "deepspeed_quantizer"
    BUILD_VAR = "DS_BUILD_DEEPSPEED_QUANTIZER"

    def sources(self) -> list[str]:
        file = "cpu.cpp" if self.build_for_cpu else "cuda.cu"
        return [f"ops/deepspeed_quantizer/{file}"]


kit = library(DeepSpeedQuantizerBuilder, functions="opkiln.ops.deepspeed_quantizer.functions")
