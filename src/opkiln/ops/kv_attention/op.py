"""Attention with a cache of keys and values."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "kv_attention",
    cuda="decode.cu",
    namespace="opkiln",
    needs={"archs": "8.0"},  # tensor cores with bfloat16, and asynchronous copies
    variants={
        "HEAD": (64, 80, 96, 128, 192, 256),
        "T": ("half", "bfloat16"),
        "PAGED": (False, True),
    },
    ahead={"HEAD": (64, 128)},  # those of most models; a library takes seconds to compile
    functions="opkiln.ops.kv_attention.functions",
)
# The kernel's matrix instructions are NVIDIA's: on ROCm the reference serves.
kit.builder.BACKENDS = ("cuda",)
