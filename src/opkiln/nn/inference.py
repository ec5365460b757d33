"""The fused pieces of a decoder. Importing this is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.kv_attention.attention import KVCache as KVCache
    from opkiln.ops.kv_attention.attention import attention as attention
    from opkiln.ops.mixed_gemm.gemm import mixed_gemm as mixed_gemm
    from opkiln.ops.mixed_gemm.gemm import mixed_moe_gemm as mixed_moe_gemm
    from opkiln.ops.mixed_gemm.gemm import moe_gemm as moe_gemm
    from opkiln.ops.transformer_inference.functions.activations import bias_add as bias_add
    from opkiln.ops.transformer_inference.functions.activations import bias_gelu as bias_gelu
    from opkiln.ops.transformer_inference.functions.activations import bias_relu as bias_relu
    from opkiln.ops.transformer_inference.functions.activations import bias_silu as bias_silu
    from opkiln.ops.transformer_inference.functions.activations import gated_gelu as gated_gelu
    from opkiln.ops.transformer_inference.functions.activations import gated_silu as gated_silu
    from opkiln.ops.transformer_inference.functions.linear import dequantize_int8 as dequantize_int8
    from opkiln.ops.transformer_inference.functions.linear import int8_linear as int8_linear
    from opkiln.ops.transformer_inference.functions.norms import layer_norm as layer_norm
    from opkiln.ops.transformer_inference.functions.norms import post_layer_norm as post_layer_norm
    from opkiln.ops.transformer_inference.functions.norms import post_rms_norm as post_rms_norm
    from opkiln.ops.transformer_inference.functions.norms import pre_layer_norm as pre_layer_norm
    from opkiln.ops.transformer_inference.functions.norms import pre_rms_norm as pre_rms_norm
    from opkiln.ops.transformer_inference.functions.norms import rms_norm as rms_norm
    from opkiln.ops.transformer_inference.functions.residuals import (
        moe_res_matmul as moe_res_matmul,
    )
    from opkiln.ops.transformer_inference.functions.residuals import residual_add as residual_add
    from opkiln.ops.transformer_inference.functions.rotary import rotary as rotary
    from opkiln.ops.transformer_inference.functions.rotary import rotary_ as rotary_
    from opkiln.ops.transformer_inference.functions.rotary import rotary_qk as rotary_qk
    from opkiln.ops.transformer_inference.functions.rotary import rotary_qk_ as rotary_qk_
    from opkiln.ops.transformer_inference.functions.softmax import softmax as softmax
    from opkiln.ops.transformer_inference.functions.softmax import softmax_ as softmax_

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.kv_attention.attention": "KVCache attention",
    "opkiln.ops.mixed_gemm.gemm": "mixed_gemm mixed_moe_gemm moe_gemm",
    "opkiln.ops.transformer_inference.functions.activations":
        "bias_add bias_gelu bias_relu bias_silu gated_gelu gated_silu",
    "opkiln.ops.transformer_inference.functions.linear": "dequantize_int8 int8_linear",
    "opkiln.ops.transformer_inference.functions.norms":
        "layer_norm post_layer_norm post_rms_norm pre_layer_norm pre_rms_norm rms_norm",
    "opkiln.ops.transformer_inference.functions.residuals": "moe_res_matmul residual_add",
    "opkiln.ops.transformer_inference.functions.rotary": "rotary rotary_ rotary_qk rotary_qk_",
    "opkiln.ops.transformer_inference.functions.softmax": "softmax softmax_",
})  # fmt: skip
