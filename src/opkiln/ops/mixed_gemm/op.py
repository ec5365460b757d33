"""Matrix products with weights of 4, 6 or 8 bits, and of tokens that are grouped by expert."""

from __future__ import annotations

from typing import NamedTuple

from opkiln.builder.library import library


class WeightFormat(NamedTuple):
    """A format of weights that the kernel takes. ``kind`` is the template of formats.h."""

    name: str
    kind: str
    bits: int
    step: int  # rows of weights have a multiple of so many columns

    @property
    def chunk(self) -> int:
        """Groups within a row have a multiple of so many columns."""
        return 4 * self.step


FORMATS = (
    WeightFormat("plain", "Plain", 16, 8),
    WeightFormat("int8", "Int8", 8, 16),
    WeightFormat("int4", "Int4", 4, 32),
    WeightFormat("e3m2", "E3M2", 6, 64),
    WeightFormat("e4m3", "E4M3", 8, 16),
    WeightFormat("e5m2", "E5M2", 8, 16),
)
NUMBERS = {each.name: number for number, each in enumerate(FORMATS)}
ACTIVATIONS = ("identity", "gelu", "relu", "silu")  # in the order of few_rows.h

kit = library(
    "mixed_gemm",
    cuda="few_rows.cu",
    namespace="opkiln",
    needs={"archs": "8.0"},  # tensor cores with bfloat16
    variants={
        "CODES": tuple(each.kind for each in FORMATS),
        "T": ("half", "bfloat16"),
    },
    functions="opkiln.ops.mixed_gemm.functions",
)
# The kernel's matrix instructions are NVIDIA's: on ROCm the reference serves.
kit.builder.BACKENDS = ("cuda",)
