"""Adds of biases and residuals to images whose channels come last in memory. Importing this module
is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.spatial_inference.functions import spatial_bias_add as spatial_bias_add

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.spatial_inference.functions": "spatial_bias_add",
})  # fmt: skip
