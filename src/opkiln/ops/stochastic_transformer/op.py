"""What a training layer does with less precision in its stochastic mode."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "stochastic_transformer",
    cuda="gelu.cu",
    namespace="opkiln",
    functions="opkiln.ops.stochastic_transformer.functions",
    dtypes=("float32", "bfloat16", "float16"),
)
