"""The builder and the schemas of ``deepspeed_quantizer``.

Imports no torch: it is on the cache-hit path.
"""

from __future__ import annotations

from opkiln.base.model import CPU, EMULATED, ROCM
from opkiln.builder import CUDAOpBuilder
from opkiln.ops import given_by

_FORMAT = "int bits, bool symmetric"
_LAID = "bool with_zero, int nodes, int devices_per_node, int pipeline"
_LEVELS = "Tensor levels, Tensor params"
_COUNTS = "int parts, int in_groups, int out_groups"


class DeepSpeedQuantizerBuilder(CUDAOpBuilder):
    """``load()`` gives the functions of reference.py, which says what each computes."""

    NAME = "deepspeed_quantizer"
    BUILD_VAR = "DS_BUILD_DEEPSPEED_QUANTIZER"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (
        f"deepspeed_quantize(Tensor x, int groups, {_FORMAT}, {_LAID}) -> ({_LEVELS})",
        f"deepspeed_dequantize({_LEVELS}, int groups, {_FORMAT}, ScalarType dtype) -> Tensor",
        f"deepspeed_reduce({_LEVELS}, {_COUNTS}, {_FORMAT}, bool with_zero) -> ({_LEVELS})",
    )
    reference = given_by("opkiln.ops.deepspeed_quantizer.reference")

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
