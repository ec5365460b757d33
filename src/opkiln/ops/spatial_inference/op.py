"""Adds of biases and residuals to images whose channels come last in memory."""

from __future__ import annotations

from opkiln.builder.library import library

kit = library(
    "spatial_inference",
    "cpu.cpp",
    cuda="cuda.cu",
    functions="opkiln.ops.spatial_inference.functions",
    namespace="opkiln",
)
