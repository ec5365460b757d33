"""What ``spatial_inference`` is compiled from. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "spatial_inference",
    "cpu.cpp",
    cuda="cuda.cu",
    functions="opkiln.ops.spatial_inference.functions",
    namespace="opkiln",
)
