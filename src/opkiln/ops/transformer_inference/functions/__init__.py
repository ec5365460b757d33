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
from opkiln.ops.transformer_inference.functions.linear import dequantize_int8, int8_linear
from opkiln.ops.transformer_inference.functions.norms import (
    layer_norm,
    post_layer_norm,
    post_rms_norm,
    pre_layer_norm,
    pre_rms_norm,
    rms_norm,
)
from opkiln.ops.transformer_inference.functions.residuals import moe_res_matmul, residual_add
from opkiln.ops.transformer_inference.functions.rotary import (
    rotary,
    rotary_,
    rotary_qk,
    rotary_qk_,
)
from opkiln.ops.transformer_inference.functions.softmax import softmax, softmax_

__all__ = [
    "bias_add",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "dequantize_int8",
    "gated_gelu",
    "gated_silu",
    "int8_linear",
    "layer_norm",
    "moe_res_matmul",
    "post_layer_norm",
    "post_rms_norm",
    "pre_layer_norm",
    "pre_rms_norm",
    "residual_add",
    "rms_norm",
    "rotary",
    "rotary_",
    "rotary_qk",
    "rotary_qk_",
    "softmax",
    "softmax_",
]
