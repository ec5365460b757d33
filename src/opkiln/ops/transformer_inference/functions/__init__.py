"""The functions of the library. Importing this package declares all of them."""

from __future__ import annotations

from opkiln.ops.transformer_inference.functions import activations, norms, residuals

__all__ = ["activations", "norms", "residuals"]
