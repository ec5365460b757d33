"""Which functions of DeepSpeed's modules an op of opkiln serves. Data: nothing is imported.

What is not listed here comes from DeepSpeed's own sources, function by function: see
``engine.functions``.
"""

from __future__ import annotations

from typing import NamedTuple


class Module(NamedTuple):
    """The stand-in for one of DeepSpeed's modules."""

    home: str  # the subclass of OpModule, as module:class
    functions: tuple[str, ...]  # that it has; any other one is DeepSpeed's own


def _module(home: str, functions: str, for_each: str = "", suffixes: str = "") -> Module:
    """``for_each`` names functions that there are once for each suffix."""
    each = [f"{name}_{suffix}" for name in for_each.split() for suffix in suffixes.split()]
    return Module(home, (*functions.split(), *each))


_LAYER = "create_transformer_layer forward backward"

MODULES = {
    "async_io": _module("files:AsyncIO", "aio_handle aio_read aio_write deepspeed_memcpy"),
    "cpu_adam": _module(
        "optimizers:CPUAdam", "create_adam adam_update adam_rollback destroy_adam"
    ),
    "cpu_adagrad": _module(
        "optimizers:CPUAdagrad", "create_adagrad adagrad_update destroy_adagrad"
    ),
    "cpu_lion": _module("optimizers:CPULion", "create_lion lion_update destroy_lion"),
    "fused_adam": _module("optimizers:FusedAdam", "multi_tensor_adam"),
    "fused_lion": _module("optimizers:FusedLion", "multi_tensor_lion"),
    "fused_lamb": _module("optimizers:FusedLamb", "lamb"),
    "evoformer_attn": _module("evoformer:EvoformerAttention", "attention attention_bwd"),
    "gds": _module("files:GDS", "gds_handle"),
    "pin_memory": _module("files:PinMemory", "pin_handle"),
    "quantizer": _module(
        "quantizer:Quantizer",
        "quantize dequantize dequantize_fp32 swizzle_quant quantized_reduction "
        "dequantize_int4_to_half_experimental dequantize_int8_to_half_experimental "
        "QuantizationType Symmetric Asymmetric",
    ),
    "ragged_device_ops": _module(
        "ragged:RaggedDeviceOps",
        "build_atoms flash_attn_by_atoms kv_rotary_embeddings kv_trained_rotary_embeddings "
        "linear_kv_copy ragged_embed gather_for_logits top_k_gating moe_scatter moe_gather",
    ),
    "ragged_ops": _module(
        "ragged:RaggedHostOps", "allocate_fast_host_buffer allocate_view_on allocate_view_like"
    ),
    "random_ltd": _module(
        "layers:RandomLTD",
        "token_sort_ token_gather token_scatter_ mask_gather_bert mask_gather_gpt",
    ),
    "sparse_attn": _module("sparse:SparseAttn", "SparseSelfAttention"),
    "spatial_inference": _module(
        "layers:SpatialInference", "nhwc_bias_add nhwc_bias_add_add nhwc_bias_add_bias_add"
    ),
    "cutlass_ops": _module("gemm:CutlassOps", "moe_gemm mixed_gemm mixed_moe_gemm"),
    "deepspeed_shm_comm": _module("shm_comm:ShmComm", "initialize vector_kernel_level"),
    "inference_core_ops": _module(
        "inference:InferenceCore",
        "bias_activation gated_activation layer_norm pre_layer_norm post_layer_norm rms_norm "
        "rms_pre_norm blas_linear blas_4d_matmul cuda_wf6af16_linear preprocess_weight "
        "create_handle",
    ),
    "stochastic_transformer": _module(
        "training:StochasticTransformer", "", _LAYER, "fp32 fp16"
    ),
    "transformer": _module("training:Transformer", "", _LAYER, "fp32 fp16"),
    "transformer_inference": _module(
        "inference:TransformerInference",
        "layer_norm rms_norm pre_rms_norm _layer_norm_residual "
        "layer_norm_residual_store_pre_ln_res gated_activation _vector_add moe_res_matmul "
        "apply_rotary_pos_emb reset_cache release_workspace retake_workspace "
        "softmax_context_int8 vector_matmul_int8 fused_gemm_gelu_int8",
        "softmax softmax_context bias_add bias_gelu bias_relu bias_residual residual_add_bias "
        "qkv_gemm rms_qkv_gemm mlp_gemm rms_mlp_gemm vector_matmul linear_layer fused_gemm_gelu "
        "einsum_sec_sm_ecm add_padding pad_transform dequantize allocate_workspace "
        "repeat_kv_cache",
        "fp32 fp16 bf16",
    ),
    "utils": _module("layers:ByteTensors", "cast_to_byte_tensor flatten unflatten"),
}  # fmt: skip
