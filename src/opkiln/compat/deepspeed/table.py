"""The functions of DeepSpeed's modules that ops of opkiln serve. Data: nothing is imported.

Other functions come from DeepSpeed's own sources, one by one: see ``engine.functions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Module(NamedTuple):
    """The stand-in for one of DeepSpeed's modules. Texts are names with spaces between them."""

    # The places of its functions, in the order of the search: modules of this package (with a dot
    # before them) or below opkiln, or module:class, which is called with the stand-in.
    homes: str
    names: str
    for_each: str = ""  # functions that there are once for each suffix
    suffixes: str = ""
    loads: str = ""  # functions of opkiln.ops whose libraries are loaded at once
    dtype: str = ""  # the library for this one is loaded, if there is one for each
    no_grad: bool = True  # its functions have no gradients
    # By DeepSpeed's name, functions that have another name in their home, or other arguments. The
    # arguments follow in DeepSpeed's order. The result is written over the one with a "!", if that
    # is contiguous.
    renamed: Mapping[str, str] = {}

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions that it has; any other one is DeepSpeed's own."""
        suffixes = self.suffixes.split()
        each = (f"{name}_{suffix}" for name in self.for_each.split() for suffix in suffixes)
        return (*self.names.split(), *each)


_HOST, _FUSED = ".optimizers:HostOptimizers", ".optimizers:FusedOptimizers"
_LAYER = "create_transformer_layer forward backward"
_NORMS = "transformer.functions:norm_with_moments"
_NORM = "transformer_inference.functions.norms:layer_norm"

MODULES = {
    "async_io": Module(".files", "aio_handle aio_read aio_write"),
    "cpu_adam": Module(_HOST, "create_adam adam_update adam_rollback destroy_adam"),
    "cpu_adagrad": Module(_HOST, "create_adagrad adagrad_update destroy_adagrad"),
    "cpu_lion": Module(_HOST, "create_lion lion_update destroy_lion"),
    "fused_adam": Module(_FUSED, "multi_tensor_adam"),
    "fused_lion": Module(_FUSED, "multi_tensor_lion"),
    "fused_lamb": Module(_FUSED, "lamb"),
    "evoformer_attn": Module(
        ".layers", "attention attention_bwd",
        loads="evoformer_attn.functions:evoformer_attention", dtype="bfloat16",
    ),
    "gds": Module(".files", "gds_handle"),
    "pin_memory": Module(".files", "pin_handle"),
    "quantizer": Module(
        ".quantizer:Quantizer",
        "quantize dequantize dequantize_fp32 swizzle_quant quantized_reduction "
        "dequantize_int4_to_half_experimental dequantize_int8_to_half_experimental "
        "QuantizationType Symmetric Asymmetric",
    ),
    "ragged_device_ops": Module(
        ".ragged",
        "build_atoms flash_attn_by_atoms kv_rotary_embeddings kv_trained_rotary_embeddings "
        "linear_kv_copy ragged_embed gather_for_logits top_k_gating moe_scatter moe_gather",
        loads="ragged_device_ops.functions.paged:paged_kv_copy",
    ),
    "ragged_ops": Module(
        ".ragged", "allocate_fast_host_buffer allocate_view_on allocate_view_like"
    ),
    "random_ltd": Module(
        "ops.random_ltd.functions",
        "token_sort_ token_gather token_scatter_ mask_gather_bert mask_gather_gpt",
        loads="random_ltd.functions:token_sort",
        renamed={
            "token_sort_": "token_sort_(indices!, tokens)",
            "token_scatter_": "token_scatter_(x!, part, indices, batch_first)",
        },
    ),
    "sparse_attn": Module(".layers", "SparseSelfAttention"),
    # ``(x + bias) + (other + other_bias)``, without those that are not given
    "spatial_inference": Module(
        "ops.spatial_inference.functions",
        "nhwc_bias_add nhwc_bias_add_add nhwc_bias_add_bias_add",
        loads="spatial_inference.functions:spatial_bias_add",
        renamed=dict.fromkeys(
            ("nhwc_bias_add", "nhwc_bias_add_add", "nhwc_bias_add_bias_add"), "spatial_bias_add"
        ),
    ),
    "cutlass_ops": Module(".layers", "moe_gemm mixed_gemm mixed_moe_gemm"),
    "deepspeed_shm_comm": Module(".shm_comm", "initialize vector_kernel_level"),
    "inference_core_ops": Module(
        "ops.transformer_inference.core ops.mixed_gemm.core .inference",
        "bias_activation gated_activation layer_norm pre_layer_norm post_layer_norm rms_norm "
        "rms_pre_norm blas_linear cuda_wf6af16_linear preprocess_weight create_handle",
        loads=_NORM, no_grad=False,
    ),
    "stochastic_transformer": Module(
        ".training:Transformer", "", _LAYER, "fp32 fp16",
        loads=f"{_NORMS} stochastic_transformer.functions:stochastic_gelu_dropout",
    ),
    "transformer": Module(".training:Transformer", "", _LAYER, "fp32 fp16", loads=_NORMS),
    "transformer_inference": Module(
        ".inference .workspace:Workspace nn.inference",
        "layer_norm rms_norm pre_rms_norm _layer_norm_residual "
        "layer_norm_residual_store_pre_ln_res gated_activation _vector_add moe_res_matmul "
        "apply_rotary_pos_emb reset_cache release_workspace retake_workspace "
        "vector_matmul_int8 fused_gemm_gelu_int8",
        "softmax softmax_context bias_add bias_gelu bias_relu bias_residual residual_add_bias "
        "qkv_gemm rms_qkv_gemm mlp_gemm rms_mlp_gemm vector_matmul linear_layer fused_gemm_gelu "
        "einsum_sec_sm_ecm pad_transform dequantize allocate_workspace "
        "repeat_kv_cache",
        "fp32 fp16 bf16",
        loads=_NORM,
        renamed={
            "bias_add": "bias_add(x!, bias)",
            "bias_gelu": "bias_gelu(x!, bias)",
            "bias_relu": "bias_relu(x!, bias)",
            "_vector_add": "residual_add(residual!, hidden, scale)",
            "pre_rms_norm": "pre_rms_norm(x, residual, weight, eps)",
            "_layer_norm_residual": "post_layer_norm(x, input_bias, residual, weight, bias, eps)",
            "layer_norm_residual_store_pre_ln_res":
                "pre_layer_norm(x, input_bias, residual, weight, bias, eps)",
        },
    ),
    "utils": Module(
        ".layers ops.utils.flatten", "cast_to_byte_tensor flatten unflatten", no_grad=False
    ),
}  # fmt: skip
