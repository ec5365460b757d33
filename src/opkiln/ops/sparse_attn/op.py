"""Attention over listed blocks of keys: layouts, forward and backward."""

from __future__ import annotations

from opkiln.builder.library import library

# One for each direction and dtype, so that a process waits for what it calls alone.
forward, backward = (
    library(
        f"sparse_attn__{name}",
        f"{name}.cpp",
        cuda=f"{name}.cu",
        namespace="opkiln",
        # Tensor cores with bfloat16, and asynchronous copies; on Hopper, instructions of its own.
        needs={"archs": "8.0;9.0a"},
        functions="opkiln.ops.sparse_attn.functions",
        dtypes=("float32", "bfloat16", "float16"),
    )
    for name in ("forward", "backward")
)
# The kernels' matrix instructions are NVIDIA's: on ROCm the reference serves.
forward.builder.BACKENDS = backward.builder.BACKENDS = ("cuda", "cpu")
kit = library("sparse_attn", parts=(forward, backward))
