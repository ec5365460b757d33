"""The libraries of ``stochastic_transformer``, one for each dtype. Imports no torch: it is on the
cache-hit path."""

from __future__ import annotations

from opkiln.authoring.library import library

_DROPOUT = "Tensor? seed=None, SymInt site=0, float p=0.0"

kit = library(
    "stochastic_transformer",
    cuda="gelu.cu",
    namespace="opkiln",
    functions="opkiln.ops.stochastic_transformer.functions",
    dtypes=("float32", "bfloat16", "float16"),
    schemas=(
        f"stochastic_gelu_dropout(Tensor x, Tensor bias, {_DROPOUT}) -> Tensor",
        (
            f"stochastic_gelu_dropout_backward(Tensor grad, Tensor x, Tensor bias, {_DROPOUT}, "
            "bool recompute=False) -> (Tensor, Tensor, Tensor)"
        ),
    ),
)
