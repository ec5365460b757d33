"""The fused pieces of a decoder. Importing this is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.kv_attention.attention import KVCache, attention
    from opkiln.ops.mixed_gemm.gemm import mixed_gemm, mixed_moe_gemm, moe_gemm
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
    from opkiln.ops.transformer_inference.functions.residuals import (
        moe_res_matmul,
        residual_add,
    )
    from opkiln.ops.transformer_inference.functions.rotary import (
        rotary,
        rotary_,
        rotary_qk,
        rotary_qk_,
    )
    from opkiln.ops.transformer_inference.functions.softmax import softmax, softmax_

__all__ = [
    "KVCache",
    "attention",
    "bias_add",
    "bias_gelu",
    "bias_relu",
    "bias_silu",
    "dequantize_int8",
    "gated_gelu",
    "gated_silu",
    "int8_linear",
    "layer_norm",
    "mixed_gemm",
    "mixed_moe_gemm",
    "moe_gemm",
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

_FUNCTIONS = "opkiln.ops.transformer_inference.functions"
_HOMES = {
    **dict.fromkeys(__all__, f"{_FUNCTIONS}.activations"),
    **{name: f"{_FUNCTIONS}.norms" for name in __all__ if name.endswith("_norm")},
    **dict.fromkeys(("KVCache", "attention"), "opkiln.ops.kv_attention.attention"),
    **dict.fromkeys(("mixed_gemm", "mixed_moe_gemm", "moe_gemm"), "opkiln.ops.mixed_gemm.gemm"),
    **dict.fromkeys(("dequantize_int8", "int8_linear"), f"{_FUNCTIONS}.linear"),
    **dict.fromkeys(("moe_res_matmul", "residual_add"), f"{_FUNCTIONS}.residuals"),
    **dict.fromkeys(("rotary", "rotary_", "rotary_qk", "rotary_qk_"), f"{_FUNCTIONS}.rotary"),
    **dict.fromkeys(("softmax", "softmax_"), f"{_FUNCTIONS}.softmax"),
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
