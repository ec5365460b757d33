"""The libraries of ``stochastic_transformer``, one for each dtype. Imports no torch: it is on the
cache-hit path."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "stochastic_transformer",
    cuda="gelu.cu",
    namespace="opkiln",
    functions="opkiln.ops.stochastic_transformer.functions",
    dtypes=("float32", "bfloat16", "float16"),
)
