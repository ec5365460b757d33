"""The libraries of ``transformer``: what a training layer has between its matrix products. One for
each family and dtype, so that a process waits for what it calls alone. Imports no torch: it is on
the cache-hit path."""

from __future__ import annotations

from opkiln.builder.library import Library, library


def _family(name: str, *sources: str) -> Library:
    return library(
        f"transformer__{name}",
        cuda=sources,
        namespace="opkiln",
        functions="opkiln.ops.transformer.functions",
        dtypes=("float32", "bfloat16", "float16"),
    )


norms = _family("norms", "norm.cu", "norm_backward.cu")
columns = _family("columns", "columns.cu")
kit = library("transformer", parts=(norms, columns))
