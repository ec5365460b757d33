"""What ``spatial_inference`` is compiled from. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.authoring.library import library

kit = library(
    "spatial_inference",
    "cpu.cpp",
    cuda="cuda.cu",
    schemas=(
        (
            "spatial_bias_add(Tensor x, Tensor bias, Tensor? other=None, Tensor? other_bias=None, "
            "SymInt? channel_dim=None) -> Tensor"
        ),
    ),
    functions="opkiln.ops.spatial_inference.functions",
    namespace="opkiln",
)
