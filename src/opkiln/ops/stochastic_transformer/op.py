"""The library ``stochastic_transformer``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.authoring.library import library

kit = library(
    "stochastic_transformer",
    cuda="gelu.cu",
    namespace="opkiln",
    functions="opkiln.ops.stochastic_transformer.functions",
    schemas=(
        (
            "stochastic_gelu_dropout(Tensor x, Tensor bias, Tensor? seed=None, SymInt site=0, "
            "float p=0.0) -> Tensor"
        ),
        (
            "stochastic_gelu_dropout_backward(Tensor grad, Tensor x, Tensor bias, Tensor? seed=None, "
            "SymInt site=0, float p=0.0, bool recompute=False) -> (Tensor, Tensor, Tensor)"
        ),
    ),
)
