"""What ``random_ltd`` is compiled from. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "random_ltd",
    "cpu.cpp",
    cuda=("tokens.cu", "masks.cu", "sort.cu"),
    functions="opkiln.ops.random_ltd.functions",
    namespace="opkiln",
)
