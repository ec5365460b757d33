"""Random layer-token drop: layers that see some of the tokens, drawn anew in each step."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "random_ltd",
    "cpu.cpp",
    cuda=("tokens.cu", "masks.cu", "sort.cu"),
    functions="opkiln.ops.random_ltd.functions",
    namespace="opkiln",
)
