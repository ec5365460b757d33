"""The functions of DeepSpeed's ``transformer_inference`` that multiply by weights.

Weights are [inputs, outputs], or [outputs, inputs] if ``transposed_mode``. int8 weights are always
[outputs, inputs], with as many groups of rows as their scales have rows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from opkiln.compat.deepspeed.inference_pieces import (
    GATED_GELU,
    GATED_SILU,
    GELU,
    RELU,
    gated_activation,
    softmax,
)
from opkiln.ops.transformer_inference import functions as ops


def vector_matmul(
    x: Tensor, weight: Tensor, _async: bool, scale: Tensor, int8: bool, transposed: bool
) -> Tensor:
    return _linear(x, weight, scale, None, int8, transposed)


def qkv_gemm(
    x: Tensor,
    weight: Tensor,
    q_scale: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    add_bias: bool,
    q_int8: bool,
    transposed_mode: bool,
) -> list[Tensor]:
    """The linear layer after a layer norm, and the norm."""
    norm = ops.layer_norm(x, gamma, beta, epsilon)
    used = bias if add_bias else None
    return [_linear(norm, weight, q_scale, used, q_int8, transposed_mode), norm]


def rms_qkv_gemm(
    x: Tensor,
    weight: Tensor,
    q_scale: Tensor,
    gamma: Tensor,
    epsilon: float,
    q_int8: bool,
    transposed_mode: bool,
) -> list[Tensor]:
    """The linear layer after an rms norm, and the norm."""
    norm = ops.rms_norm(x, gamma, epsilon)
    return [_linear(norm, weight, q_scale, None, q_int8, transposed_mode), norm]


def mlp_gemm(
    x: Tensor,
    residual: Tensor,
    input_bias: Tensor,
    weight_interm: Tensor,
    weight_out: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    preLayerNorm: bool,  # noqa: ARG001, N803 (DeepSpeed does not read it, either)
    mlp_after_attn: bool,
    q_scale: Tensor,
    q_scale1: Tensor,
    q_int8: bool,
    activation_type: int,
    transposed_mode: bool,
) -> list[Tensor]:
    """The MLP after a layer norm, without its last bias, and the norm. The norm is that of the sum
    with the residual if the MLP comes after the attention, and of the residual alone if not."""
    if mlp_after_attn:
        norm = ops.post_layer_norm(x, residual, gamma, beta, input_bias, epsilon)
    else:
        norm = ops.layer_norm(residual, gamma, beta, epsilon)
    wide = _linear(norm, weight_interm, q_scale, None, q_int8, transposed_mode)
    active = _activated(wide, bias, activation_type)
    return [_linear(active, weight_out, q_scale1, None, q_int8, transposed_mode), norm]


def rms_mlp_gemm(
    x: Tensor,
    residual: Tensor,
    weight_interm: Tensor,
    weight_out: Tensor,
    gamma: Tensor,
    epsilon: float,
    q_scale: Tensor,
    q_scale1: Tensor,
    q_int8: bool,
    activation_type: int,
    transposed_mode: bool,
) -> list[Tensor]:
    """The MLP after an rms norm of ``x + residual``, and that sum, written into
    ``residual``."""
    norm, total = ops.pre_rms_norm(x, residual, gamma, None, epsilon)
    residual.copy_(total)
    wide = _linear(norm, weight_interm, q_scale, None, q_int8, transposed_mode)
    if activation_type in (GATED_GELU, GATED_SILU):
        active = gated_activation(wide, None, activation_type)
    else:
        active = _activated(wide, None, activation_type)
    return [_linear(active, weight_out, q_scale1, None, q_int8, transposed_mode), residual]


def fused_gemm_gelu(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    weight_out: Tensor,
    weight_out_scale: Tensor,
    q_int8: bool,
    transposed_mode: bool,
) -> Tensor:
    """An MLP with gelu by tanh, without its last bias."""
    wide = _linear(x, weight, weight_scale, None, q_int8, transposed_mode)
    active = ops.bias_gelu(wide, bias)
    return _linear(active, weight_out, weight_out_scale, None, q_int8, transposed_mode)


def linear_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    add_bias: bool,
    do_flash_attn: bool,
    num_heads: int,
    transposed_mode: bool,
    rope_theta: float,  # noqa: ARG001 (nothing is rotated here)
) -> Tensor:
    """A linear layer. With ``do_flash_attn`` its result, queries, keys and values, is laid out as
    [3, batch, heads, sequence, head], with heads padded by zeros to 32, 64 or 128."""
    out = _linear(x, weight, None, bias if add_bias else None, False, transposed_mode)
    if not do_flash_attn:
        return out
    batch, seq, hidden = x.shape
    head = hidden // num_heads
    parts = out.view(batch, seq, 3, num_heads, head).permute(2, 0, 3, 1, 4)
    if head % 64:
        parts = functional.pad(parts, (0, _padded(head) - head))
    return parts.contiguous()


def softmax_context_int8(
    query: Tensor,
    prev_key: Tensor,
    new_key: Tensor,  # noqa: ARG001 (nor does DeepSpeed read it)
    attn_mask: Tensor,
    prev_value: Tensor,
    new_value: Tensor,
    heads: int,
    norm_factor: float,
    merging: bool,  # noqa: ARG001
    triangular: bool,
    local_attention: bool,
    window_size: int,
    no_masking: bool,  # noqa: ARG001 (a mask of one dimension says it)
) -> list[Tensor]:
    """Attention, [batch, heads, queries, head], with scores times ``norm_factor``, and the keys and
    values as they are. Nothing of it is int8, in DeepSpeed either.

    ``query`` and ``prev_value`` are [batch, tokens, hidden] by name; their memory is read as
    [batch, heads, tokens, head], and that of ``prev_key`` as [batch, heads, head, tokens]. With
    ``triangular``, query ``i`` sees the keys up to ``i``, if ``new_value`` is empty.
    """
    batch, queries = query.shape[:2]
    tokens, head = prev_value.shape[1], prev_value.shape[2] // heads
    q = query.reshape(batch, heads, queries, head)
    keys = prev_key.reshape(batch, heads, head, tokens)
    values = prev_value.reshape(batch, heads, tokens, head)
    first = new_value.dim() < 2 or new_value.shape[1] == 0
    none = query.new_empty(1)
    shares = softmax(
        (q * norm_factor) @ keys, attn_mask, none, triangular and first, first, local_attention,
        window_size, False, 1.0, 0, 1,
    )  # fmt: skip
    return [shares @ values, prev_key, prev_value]


def einsum_sec_sm_ecm(Q: Tensor, W: Tensor) -> Tensor:  # noqa: N803 (DeepSpeed's names)
    """The sum over ``s`` of ``Q[s, e, c] * W[s, m]``."""
    return (Q.flatten(1).t() @ W).view(Q.shape[1], Q.shape[2], W.shape[1])


def add_padding(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """[batch, heads, sequence, head] with heads padded by zeros to 32, 64 or 128, and keys and
    values to 128 tokens."""
    more = _padded(query.shape[3]) - query.shape[3]
    tokens = max(128 - key.shape[2], 0)
    return [
        functional.pad(query, (0, more)),
        functional.pad(key, (0, more, 0, tokens)),
        functional.pad(value, (0, more, 0, tokens)),
    ]


def pad_transform(
    query: Tensor, key: Tensor, value: Tensor, heads: int, add_padding: bool
) -> list[Tensor]:
    """[batch, sequence, hidden] as [batch, heads, sequence, head], padded as by ``add_padding``."""
    q, k, v = (
        each.view(*each.shape[:2], heads, -1).transpose(1, 2) for each in (query, key, value)
    )
    if add_padding:
        return _add_padding(q, k, v)
    return [q.contiguous(), k.contiguous(), v.contiguous()]


_add_padding = add_padding  # pad_transform has an argument of this name


def _dequantize(dtype: torch.dtype, weight: Tensor, qscale: Tensor, groups: int) -> Tensor:
    return ops.dequantize_int8(weight, qscale.reshape(-1)[:groups], dtype)


dequantize_fp32 = partial(_dequantize, torch.float32)
dequantize_fp16 = partial(_dequantize, torch.float16)
dequantize_bf16 = partial(_dequantize, torch.bfloat16)


def _linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    int8: bool,
    transposed: bool,
) -> Tensor:
    if int8 and scales is not None:
        # DeepSpeed's scales may have more columns, for parts of the weight. Those of the whole
        # weight come first in memory.
        return ops.int8_linear(x, weight, scales.reshape(-1)[: scales.shape[0]], bias)
    return functional.linear(x, weight if transposed else weight.t(), bias)


def _activated(x: Tensor, bias: Tensor | None, activation: int) -> Tensor:
    """Activations that DeepSpeed does not know leave ``x`` as it is, without the bias."""
    if activation == GELU:
        return ops.bias_gelu(x, bias)
    if activation == RELU:
        return ops.bias_relu(x, bias)
    return x


def _padded(head: int) -> int:
    return 32 if head < 32 else 64 if head < 64 else max(head, 128)
