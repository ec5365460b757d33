"""The builder and schemas of ``fp_quantizer``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.base.model import CUDA
from opkiln.builder import CUDAOpBuilder
from opkiln.ops import given_by

# A format is its bits and those of its mantissa, see formats.py. `size` is the shape of what was
# quantized, `dtype` that of the result. `offset_tensor` stands in for `offset` and is read when the
# kernel runs: each replay of a captured graph can have random bits of its own.
_QUANTIZED = "Tensor codes, Tensor scales"
_FORMAT = "int group_size, int bits, int mantissa_bits"
_SIZED = f"SymInt[] size, {_FORMAT}, ScalarType dtype"
_ROUNDING = "bool stochastic=False, int seed=0, int offset=0, Tensor? offset_tensor=None"


class FPQuantizerBuilder(CUDAOpBuilder):
    """``load()`` gives ``fp_quantize``, ``fp_dequantize`` and ``fp_dequantize_rows``; see
    reference.py."""

    NAME = "fp_quantizer"
    BUILD_VAR = "DS_BUILD_FP_QUANTIZER"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (
        f"fp_quantize(Tensor x, {_FORMAT}, {_ROUNDING}) -> ({_QUANTIZED})",
        f"fp_dequantize({_QUANTIZED}, {_SIZED}) -> Tensor",
        f"fp_dequantize_rows({_QUANTIZED}, Tensor rows, {_SIZED}) -> Tensor",
    )
    reference = given_by("opkiln.ops.fp_quantizer.reference")
    fake = given_by("opkiln.ops.fp_quantizer.fake")

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
