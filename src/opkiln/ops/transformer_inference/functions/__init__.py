"""The functions of the library. Importing this module declares all of them."""

from __future__ import annotations

from opkiln.ops.transformer_inference.functions.norms import rms_norm

__all__ = ["rms_norm"]
