"""The libraries of ``transformer``: what a training layer has between its matrix products. One for
each family and dtype, so that a process waits for what it calls alone. Imports no torch: it is on
the cache-hit path."""

from __future__ import annotations

from opkiln.authoring.library import Library, library

_DROPOUT = "Tensor? seed=None, SymInt site=0, float p=0.0"


def _family(name: str, sources: tuple[str, ...], *schemas: str) -> Library:
    return library(
        f"transformer__{name}",
        cuda=sources,
        namespace="opkiln",
        functions="opkiln.ops.transformer.functions",
        dtypes=("float32", "bfloat16", "float16"),
        schemas=schemas,
    )


norms = _family(
    "norms",
    ("norm.cu", "norm_backward.cu"),
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
)
columns = _family(
    "columns",
    ("columns.cu",),
    f"gelu_dropout(Tensor x, Tensor bias, {_DROPOUT}) -> Tensor",
    (
        f"gelu_dropout_backward(Tensor grad, Tensor x, Tensor bias, {_DROPOUT}, "
        "bool recompute=False) -> (Tensor, Tensor, Tensor)"
    ),
    "join_columns(Tensor first, Tensor second, Tensor third) -> (Tensor, Tensor)",
)
kit = library("transformer", parts=(norms, columns))
