"""The libraries of ``evoformer_attn``: one for each direction and dtype, so that a process waits
for what it calls alone. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.authoring.library import Library, library


def _direction(name: str, schema: str) -> Library:
    made = library(
        f"evoformer_attn__{name}",
        f"{name}.cpp",
        cuda=f"{name}.cu",
        namespace="opkiln",
        needs={"archs": "8.0"},  # tensor cores with bfloat16, and asynchronous copies
        dtypes=("float32", "bfloat16", "float16"),
        schemas=(schema,),
        functions="opkiln.ops.evoformer_attn.functions",
    )
    # The kernels' matrix instructions are NVIDIA's: on ROCm the reference serves.
    made.builder.BACKENDS = ("cuda", "cpu")
    return made


forward = _direction(
    "forward",
    "evoformer_attention(Tensor q, Tensor k, Tensor v, Tensor? mask_bias, Tensor? pair_bias, "
    "float scale) -> (Tensor, Tensor)",
)
backward = _direction(
    "backward",
    "evoformer_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor output, "
    "Tensor moments, Tensor? mask_bias, Tensor? pair_bias, float scale, bool mask_grad, "
    "bool pair_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
kit = library("evoformer_attn", parts=(forward, backward))
