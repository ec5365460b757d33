"""A training layer of a transformer: what it has between its matrix products."""

from __future__ import annotations

from opkiln.builder.library import library

# One for each family and dtype, so that a process waits for what it calls alone.
norms, columns = (
    library(
        f"transformer__{name}",
        cuda=sources,
        namespace="opkiln",
        functions="opkiln.ops.transformer.functions",
        dtypes=("float32", "bfloat16", "float16"),
    )
    for name, sources in (("norms", ("norm.cu", "norm_backward.cu")), ("columns", ("columns.cu",)))
)
kit = library("transformer", parts=(norms, columns))
