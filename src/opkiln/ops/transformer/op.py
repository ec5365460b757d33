"""The library ``transformer``: what a training layer has between its matrix products. Imports no
torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.authoring.library import library

_DROPOUT = "Tensor? seed=None, SymInt site=0, float p=0.0"

kit = library(
    "transformer",
    cuda=("norm.cu", "norm_backward.cu", "columns.cu"),
    namespace="opkiln",
    functions="opkiln.ops.transformer.functions",
    dtypes=("float32", "bfloat16", "float16"),
    schemas=(
        (
            "norm_with_moments(Tensor x, Tensor weight, Tensor bias, float eps=1e-05) "
            "-> (Tensor, Tensor, Tensor)"
        ),
        f"dropout_add(Tensor x, Tensor bias, Tensor residual, {_DROPOUT}) -> Tensor",
        f"dropout_add_backward(Tensor grad, {_DROPOUT}) -> (Tensor, Tensor)",
        (
            "dropout_add_norm(Tensor x, Tensor bias, Tensor residual, Tensor weight, "
            f"Tensor norm_bias, {_DROPOUT}, float eps=1e-05) -> (Tensor, Tensor, Tensor, Tensor)"
        ),
        (
            "dropout_add_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor scale, "
            f"Tensor weight, Tensor? norm_bias=None, Tensor? residual_grad=None, "
            f"{_DROPOUT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
        ),
        f"gelu_dropout(Tensor x, Tensor bias, {_DROPOUT}) -> Tensor",
        (
            f"gelu_dropout_backward(Tensor grad, Tensor x, Tensor bias, {_DROPOUT}, "
            "bool recompute=False) -> (Tensor, Tensor, Tensor)"
        ),
        "join_columns(Tensor first, Tensor second, Tensor third) -> (Tensor, Tensor)",
    ),
)
