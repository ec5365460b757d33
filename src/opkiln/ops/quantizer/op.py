"""The builder and the schemas of ``quantizer``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.base.model import CPU, EMULATED, ROCM
from opkiln.builder import CUDAOpBuilder
from opkiln.ops import given_by

# `offset_tensor` stands in for `offset` and is read when the kernel runs: each replay of a captured
# graph, and each call of a compiled function, can have random bits of its own.
_FORMAT = "int bits, int group_size, bool symmetric"
_ROUNDING = "bool stochastic, int seed, int offset"
_SWIZZLE = "int nodes, int devices_per_node, int pipeline"
_LATER = "Tensor? offset_tensor=None, bool narrow_range=True"
_LEVELS = "Tensor values, Tensor scales, Tensor offsets"  # no offsets where symmetric
_ROUNDED = f"{_ROUNDING}, {_LATER}) -> ({_LEVELS})"
_LAID = f"{_SWIZZLE}, {_LATER}) -> ({_LEVELS})"
_PARTS = (
    "Tensor[] values, Tensor[] scales, Tensor[] offsets, int numel, int from_bits, "
    "int from_group_size, bool from_symmetric, float factor"
)


class QuantizerBuilder(CUDAOpBuilder):
    """``load()`` gives the functions of reference.py, which says what each computes."""

    NAME = "quantizer"
    BUILD_VAR = "DS_BUILD_QUANTIZER"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (
        f"quantize(Tensor x, {_FORMAT}, {_ROUNDING}, {_LAID}",
        f"quantize_with_feedback(Tensor x, Tensor(a!) error, {_FORMAT}, {_ROUNDING}, {_LAID}",
        f"dequantize({_LEVELS}, int numel, ScalarType dtype, {_FORMAT}, {_SWIZZLE}) -> Tensor",
        f"fake_quantize(Tensor x, {_FORMAT}, {_ROUNDING}, {_LATER}) -> Tensor",
        f"fake_quantize_(Tensor(a!) x, {_FORMAT}, {_ROUNDING}, {_LATER}) -> ()",
        f"quantized_reduce({_PARTS}, {_FORMAT}, {_ROUNDED}",
        f"quantized_reduce_with_feedback(Tensor(a!) error, {_PARTS}, {_FORMAT}, {_ROUNDED}",
    )
    reference = given_by("opkiln.ops.quantizer.reference")
    fake = given_by("opkiln.ops.quantizer.fake")
    backward = given_by("opkiln.ops.quantizer.gradients")

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
