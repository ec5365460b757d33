"""The libraries of ``ragged_device_ops``, one for each source, so that a process waits for what it
calls alone. Imports no torch: commands know the op by it."""

from __future__ import annotations

from opkiln.builder.library import Library, library


def _family(name: str) -> Library:
    return library(
        f"ragged_device_ops__{name}",
        cuda=f"{name}.cu",
        functions=f"opkiln.ops.ragged_device_ops.functions.{name}",
        namespace="opkiln",
    )


paged, gating, rows = _family("paged"), _family("gating"), _family("rows")
kit = library("ragged_device_ops", parts=(paged, gating, rows))
