"""Kernels for ragged batches: the tokens of all sequences one after the other, without padding."""

from __future__ import annotations

from opkiln.builder.library import library

# One for each source, so that a process waits for what it calls alone.
paged, gating, rows = (
    library(
        f"ragged_device_ops__{name}",
        cuda=f"{name}.cu",
        functions=f"opkiln.ops.ragged_device_ops.functions.{name}",
        namespace="opkiln",
    )
    for name in ("paged", "gating", "rows")
)
kit = library("ragged_device_ops", parts=(paged, gating, rows))
