"""The fused pieces of a decoder. Importing this module is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.transformer_inference.functions.norms import (
        layer_norm,
        post_layer_norm,
        post_rms_norm,
        pre_layer_norm,
        pre_rms_norm,
        rms_norm,
    )

__all__ = [
    "layer_norm",
    "post_layer_norm",
    "post_rms_norm",
    "pre_layer_norm",
    "pre_rms_norm",
    "rms_norm",
]

_FUNCTIONS = "opkiln.ops.transformer_inference.functions"
_HOMES = {
    "layer_norm": f"{_FUNCTIONS}.norms",
    "post_layer_norm": f"{_FUNCTIONS}.norms",
    "post_rms_norm": f"{_FUNCTIONS}.norms",
    "pre_layer_norm": f"{_FUNCTIONS}.norms",
    "pre_rms_norm": f"{_FUNCTIONS}.norms",
    "rms_norm": f"{_FUNCTIONS}.norms",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
