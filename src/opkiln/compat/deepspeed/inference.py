"""The functions of DeepSpeed's ``transformer_inference`` that keep nothing between calls, and those
of ``inference_core_ops`` that ``opkiln.nn.core`` does not have. Those that only rename or reorder
arguments are rows of table.py.

Functions and their side effects are those of DeepSpeed's binding; docs/deepspeed.md says what
differs. Most exist once for each dtype, with its name at the end (``softmax_fp16``). Here a
tensor's own dtype decides. Those that write into their first argument do so if it is contiguous.
Otherwise, as in DeepSpeed, it stays as it is and the result is a new tensor. Shapes are [batch,
sequence, hidden], but may have any number of dimensions. Weights are [inputs, outputs], or
[outputs, inputs] if ``transposed``. int8 weights are always [outputs, inputs], with as many groups
of rows as their scales have rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opkiln.compat.deepspeed.modules import takes
from opkiln.errors import ArgumentError
from opkiln.nn import inference as ops

GELU, RELU, GATED_GELU, GATED_SILU = 1, 2, 3, 4  # DeepSpeed's ActivationFuncType

# Activations


def bias_residual(x: Tensor, _residual: Tensor, _bias: Tensor) -> Tensor:
    """Returns ``x``, contiguous. DeepSpeed's function does no more."""
    return x.contiguous()


def gated_activation(activation: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    """The first half of each row times silu, or gelu by erf, of the second."""
    if kind == GATED_GELU:
        return ops.gated_gelu(activation, bias, tanh=False, gate_first=False)
    if kind == GATED_SILU:
        return ops.gated_silu(activation, bias, gate_first=False)
    raise ArgumentError(f"actFun is {kind}, expected {GATED_GELU} (gelu) or {GATED_SILU} (silu)")


# Sums


@takes(
    "hidden_state residual attention_output attention_bias final_bias mp_size mlp_after_attention "
    "add_bias pre_norm"
)
def residual_add_bias(given: Any) -> Tensor:
    """The sum for the next layer, written into ``residual``."""
    residual: Tensor = given.residual
    after, share = given.mlp_after_attention, 1.0 / given.mp_size
    if after and not given.pre_norm:
        return residual.copy_(ops.residual_add(given.hidden_state, residual, bias=given.final_bias))
    total = ops.residual_add(
        given.hidden_state,
        residual,
        given.attention_output,
        given.final_bias,
        given.attention_bias if after or given.add_bias else None,
        scale=share,
        attention_scale=share if after else 1.0,
    )
    return residual.copy_(total)


def moe_res_matmul(moe_res: Tensor, coef: Tensor, output: Tensor) -> Tensor:
    """``moe_res`` and ``output`` times the halves of ``coef``, added, written into ``output``."""
    return output.copy_(ops.moe_res_matmul(moe_res, coef.reshape(2, -1), output))


# Attention


@takes("query key rotary_dim offset heads rotate_half rope_theta")
def apply_rotary_pos_emb(given: Any) -> list[Tensor]:
    """Rotate queries and keys, written over both. DeepSpeed's kernel does not read ``rotate_half``.

    Their shape is [batch, sequence, hidden], but as in DeepSpeed's kernel their memory is read as
    [batch, heads, sequence, head].
    """
    batch, seq, hidden = given.query.shape
    q, k = given.query.contiguous(), given.key.contiguous()
    shape = (batch, given.heads, seq, hidden // given.heads)
    positions = torch.arange(given.offset, given.offset + seq, device=q.device)
    query, key = (each.view(shape).transpose(1, 2) for each in (q, k))
    ops.rotary_qk_(query, key, positions, dim=given.rotary_dim, theta=given.rope_theta)
    return [q, k]


@takes(
    "scores mask alibi triangular recompute local_attention window_size async_op layer_scale "
    "head_offset mp_size"
)
def softmax(given: Any) -> Tensor:
    """The softmax of ``scores`` [batch, heads, queries, keys] times ``layer_scale``, plus mask and
    alibi, written over the scores. A mask or alibi of one dimension is ignored.

    With ``triangular``, query ``i`` sees the keys up to ``i``. A query that sees no key gets zeros.
    """
    scores: Tensor = given.scores
    mask = full_mask(given, given.mask, scores.shape, scores, given.mp_size, given.head_offset)
    scores = scores.contiguous()
    ops.softmax_(scores, mask, scale=given.layer_scale, causal=given.triangular)
    return scores


def full_mask(
    given: Any, mask: Tensor, shape: Sequence[int], like: Tensor, ranks: int = 1, first: int = 0
) -> Tensor | None:
    """The tensor to add to scores [batch, heads, queries, keys]: the sum of the mask, alibi (which
    has the heads of all ranks; ``first`` is the first one here) and minus infinity outside of the
    window. A sum of several is fp32. None if there is nothing to add."""
    batch, heads, queries, keys = shape
    parts = [_mask_to_add(mask, batch, keys, like.dtype)]
    if given.alibi.dim() > 1:
        alibi = given.alibi.reshape(-1, heads * ranks, 1, keys)
        parts.append(alibi[:, first : first + heads])
    if given.local_attention:
        parts.append(_window_mask(queries, keys, given.window_size, like.device))
    some = [each for each in parts if each is not None]
    if len(some) > 1:
        return reduce(torch.add, (each.float() for each in some))
    return some[0] if some else None


def _mask_to_add(mask: Tensor, batch: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """DeepSpeed's mask, to be broadcast to [batch, heads, queries, keys]; None without a mask."""
    if mask.dim() < 2:
        return None
    if mask.dim() == 2:
        mask = mask.view(-1, 1, 1, mask.shape[-1])
    elif mask.dim() == 3:
        mask = mask[:, None]
    if mask.shape[0] not in (1, batch) or mask.shape[-1] != keys:
        raise ArgumentError(
            f"attn_mask has shape {list(mask.shape)}, expected {batch} sequences and {keys} keys"
        )
    return mask if mask.dtype in (dtype, torch.float32) else mask.to(dtype)


def _window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Minus infinity for keys that are ``window`` or more before their query, 0 for others.

    If there are as many queries as keys, the first query stands at the first key. Otherwise
    DeepSpeed's kernel has the first query stand behind the last key.
    """
    at = torch.arange(queries, device=device).view(-1, 1) + (0 if queries == keys else keys)
    far = torch.arange(keys, device=device) <= at - window
    return torch.zeros(far.shape, device=device).masked_fill_(far, -torch.inf)


# Matrix products with weights


@takes("x weight async_op scale int8 transposed")
def vector_matmul(given: Any) -> Tensor:
    return _linear(given.x, given.weight, given.scale, None, given)


@takes("x weight scale bias gamma beta epsilon add_bias int8 transposed")
def qkv_gemm(given: Any) -> list[Tensor]:
    """The linear layer after a layer norm, and the norm."""
    norm = ops.layer_norm(given.x, given.gamma, given.beta, given.epsilon)
    bias = given.bias if given.add_bias else None
    return [_linear(norm, given.weight, given.scale, bias, given), norm]


@takes("x weight scale gamma epsilon int8 transposed")
def rms_qkv_gemm(given: Any) -> list[Tensor]:
    """The linear layer after an rms norm, and the norm."""
    norm = ops.rms_norm(given.x, given.gamma, given.epsilon)
    return [_linear(norm, given.weight, given.scale, None, given), norm]


@takes(
    "x residual input_bias weight weight_out bias gamma beta epsilon pre_norm mlp_after_attention "
    "scale scale_out int8 activation transposed"
)
def mlp_gemm(given: Any) -> list[Tensor]:
    """The MLP after a layer norm, without its last bias, and the norm. The norm is that of the sum
    with the residual if the MLP comes after the attention, and of the residual alone if not."""
    x, residual, affine = given.x, given.residual, (given.gamma, given.beta)
    if given.mlp_after_attention:
        norm = ops.post_layer_norm(x, residual, *affine, given.input_bias, given.epsilon)
    else:
        norm = ops.layer_norm(residual, *affine, given.epsilon)
    return [_mlp(norm, given.bias, given.activation, given), norm]


@takes("x residual weight weight_out gamma epsilon scale scale_out int8 activation transposed")
def rms_mlp_gemm(given: Any) -> list[Tensor]:
    """The MLP after an rms norm of ``x + residual``, and that sum, written into ``residual``."""
    norm, total = ops.pre_rms_norm(given.x, given.residual, given.gamma, None, given.epsilon)
    given.residual.copy_(total)
    return [_mlp(norm, None, given.activation, given, gates=True), given.residual]


@takes("x weight scale bias weight_out scale_out int8 transposed")
def fused_gemm_gelu(given: Any) -> Tensor:
    """An MLP with gelu by tanh, without its last bias."""
    return _mlp(given.x, given.bias, GELU, given)


@takes("x weight bias add_bias do_flash_attn heads transposed rope_theta")
def linear_layer(given: Any) -> Tensor:
    """A linear layer. With ``do_flash_attn`` its result, queries, keys and values, is laid out as
    [3, batch, heads, sequence, head], with heads padded by zeros to 32, 64 or 128. Nothing is
    rotated."""
    weight = given.weight if given.transposed else given.weight.t()
    out = functional.linear(given.x, weight, given.bias if given.add_bias else None)
    if not given.do_flash_attn:
        return out
    batch, seq, hidden = given.x.shape
    head = hidden // given.heads
    parts = out.view(batch, seq, 3, given.heads, head).permute(2, 0, 3, 1, 4)
    if head % 64:
        parts = functional.pad(parts, (0, _padded_head(head) - head))
    return parts.contiguous()


def create_handle() -> None:
    """Do nothing: torch has a handle for its BLAS."""


def einsum_sec_sm_ecm(tokens: Tensor, weight: Tensor) -> Tensor:
    """The sum over ``s`` of ``tokens[s, e, c] * weight[s, m]``."""
    sums = tokens.flatten(1).t() @ weight
    return sums.view(tokens.shape[1], tokens.shape[2], weight.shape[1])


def pad_transform(query: Tensor, key: Tensor, value: Tensor, heads: int, pad: bool) -> list[Tensor]:
    """[batch, sequence, hidden] as [batch, heads, sequence, head]. With ``pad``, heads are padded
    by zeros to 32, 64 or 128, and keys and values to 128 tokens."""
    q, k, v = (
        each.view(*each.shape[:2], heads, -1).transpose(1, 2) for each in (query, key, value)
    )
    if not pad:
        return [each.contiguous() for each in (q, k, v)]
    more, tokens = _padded_head(q.shape[3]) - q.shape[3], max(128 - k.shape[2], 0)
    padded = (functional.pad(each, (0, more, 0, tokens)) for each in (k, v))
    return [functional.pad(q, (0, more)), *padded]


def _dequantize(dtype: torch.dtype, weight: Tensor, scales: Tensor, groups: int) -> Tensor:
    return ops.dequantize_int8(weight, scales.reshape(-1)[:groups], dtype)


dequantize_fp32 = partial(_dequantize, torch.float32)
dequantize_fp16 = partial(_dequantize, torch.float16)
dequantize_bf16 = partial(_dequantize, torch.bfloat16)


def _linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, given: Any) -> Tensor:
    if given.int8:
        # DeepSpeed's scales may have more columns, for parts of the weight. Those of the whole
        # weight come first in memory.
        return ops.int8_linear(x, weight, scales.reshape(-1)[: scales.shape[0]], bias)
    return functional.linear(x, weight if given.transposed else weight.t(), bias)


def _mlp(
    x: Tensor, bias: Tensor | None, activation: int, given: Any, *, gates: bool = False
) -> Tensor:
    """Two linear layers with an activation between them. One that DeepSpeed does not know leaves
    its input as it is, without the bias."""
    active = _linear(x, given.weight, given.scale, None, given)
    if activation == GELU:
        active = ops.bias_gelu(active, bias)
    elif activation == RELU:
        active = ops.bias_relu(active, bias)
    elif gates and activation in (GATED_GELU, GATED_SILU):
        active = gated_activation(active, bias, activation)
    return _linear(active, given.weight_out, given.scale_out, None, given)


def _padded_head(head: int) -> int:
    return 32 if head < 32 else 64 if head < 64 else max(head, 128)
