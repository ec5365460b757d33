"""The functions of the library. Importing this package declares all of them."""

from __future__ import annotations

from opkiln.ops.transformer_inference.functions.activations import (
    bias_add,
    bias_gelu,
    bias_relu,
    bias_silu,
    gated_gelu,
    gated_silu,
)
from opkiln.ops.transformer_inference.functions.norms import (
    layer_norm,
    post_layer_norm,
    post_rms_norm,
    pre_layer_norm,
    pre_rms_norm,
    rms_norm,
)
from opkiln.ops.transformer_inference.functions.residuals import moe_res_matmul, residual_add

__all__ = [
    "bias_add",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "gated_gelu",
    "gated_silu",
    "layer_norm",
    "moe_res_matmul",
    "post_layer_norm",
    "post_rms_norm",
    "pre_layer_norm",
    "pre_rms_norm",
    "residual_add",
    "rms_norm",
]
