"""The functions of DeepSpeed's ``transformer_inference`` that multiply no matrices.

Those that write into their first argument do so if it is contiguous. Otherwise, as in DeepSpeed,
it stays as it is and the result is a new tensor. Shapes are [batch, sequence, hidden], but any
number of dimensions will do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.transformer_inference import functions as ops

GELU, RELU, GATED_GELU, GATED_SILU = 1, 2, 3, 4  # DeepSpeed's ActivationFuncType

# Norms


def _layer_norm_residual(
    x: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> Tensor:
    return ops.post_layer_norm(x, residual, gamma, beta, bias, epsilon)


def layer_norm_residual_store_pre_ln_res(
    x: Tensor, bias: Tensor, residual: Tensor, gamma: Tensor, beta: Tensor, epsilon: float
) -> list[Tensor]:
    """The norm of the sum, and the sum."""
    return list(ops.pre_layer_norm(x, residual, gamma, beta, bias, epsilon))


def pre_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float) -> list[Tensor]:
    """The norm of the sum, and the sum."""
    return list(ops.pre_rms_norm(x, residual, gamma, None, epsilon))


# Activations


def bias_add(x: Tensor, bias: Tensor) -> Tensor:
    return _over(x, ops.bias_add(x, bias))


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """By tanh."""
    return _over(x, ops.bias_gelu(x, bias))


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    return _over(x, ops.bias_relu(x, bias))


def bias_residual(x: Tensor, _residual: Tensor, _bias: Tensor) -> Tensor:
    """``x``: DeepSpeed's function has nothing else to do, either."""
    return x.contiguous()


def gated_activation(activation: Tensor, bias: Tensor | None, actFun: int) -> Tensor:  # noqa: N803 (DeepSpeed's name)
    """The first half of each row times silu, or gelu by erf, of the second."""
    if actFun == GATED_GELU:
        return ops.gated_gelu(activation, bias, tanh=False, gate_first=False)
    if actFun == GATED_SILU:
        return ops.gated_silu(activation, bias, gate_first=False)
    raise ArgumentError(f"actFun is {actFun}, expected {GATED_GELU} (gelu) or {GATED_SILU} (silu)")


# Sums


def residual_add_bias(
    hidden_state: Tensor,
    residual: Tensor,
    attention_output: Tensor,
    attention_bias: Tensor,
    final_bias: Tensor,
    mp_size: int,
    mlp_after_attn: bool,
    add_bias: bool,
    preln: bool,
) -> Tensor:
    """The sum for the next layer, written into ``residual``."""
    share = 1.0 / mp_size
    if not mlp_after_attn:
        extra = attention_bias if add_bias else None
        total = ops.residual_add(
            hidden_state, residual, attention_output, final_bias, extra, scale=share
        )
    elif preln:
        total = ops.residual_add(
            hidden_state, residual, attention_output, final_bias, attention_bias,
            scale=share, attention_scale=share,
        )  # fmt: skip
    else:
        total = ops.residual_add(hidden_state, residual, bias=final_bias)
    return residual.copy_(total)


def _vector_add(a: Tensor, b: Tensor, gamma: float) -> Tensor:
    """``gamma * a + b``, written into ``a``."""
    return a.copy_(ops.residual_add(b, a, scale=gamma))


def moe_res_matmul(moe_res: Tensor, coef: Tensor, output: Tensor) -> Tensor:
    """``moe_res`` and ``output`` times the halves of ``coef``, added, written into ``output``."""
    return output.copy_(ops.moe_res_matmul(moe_res, coef.reshape(2, -1), output))


# Attention


def apply_rotary_pos_emb(
    mixed_query: Tensor,
    key_layer: Tensor,
    rotary_dim: int,
    offset: int,
    num_heads: int,
    rotate_half: bool,  # noqa: ARG001 (DeepSpeed's kernel has no other way)
    rope_theta: float,
) -> list[Tensor]:
    """Rotate queries and keys, written over both.

    They have the shape [batch, sequence, hidden], and their memory is [batch, heads, sequence,
    head]: so DeepSpeed's kernel takes it.
    """
    batch, seq, hidden = mixed_query.shape
    q, k = mixed_query.contiguous(), key_layer.contiguous()
    heads = (batch, num_heads, seq, hidden // num_heads)
    positions = torch.arange(offset, offset + seq, device=q.device)
    ops.rotary_qk_(
        q.view(heads).transpose(1, 2), k.view(heads).transpose(1, 2), positions,
        dim=rotary_dim, theta=rope_theta,
    )  # fmt: skip
    return [q, k]


def softmax(
    attn_scores: Tensor,
    attn_mask: Tensor,
    alibi: Tensor,
    triangular: bool,
    recompute: bool,  # noqa: ARG001 (nor does DeepSpeed's kernel read it)
    local_attention: bool,
    window_size: int,
    async_op: bool,  # noqa: ARG001
    layer_scale: float,
    head_offset: int,
    mp_size: int,
) -> Tensor:
    """The softmax of ``attn_scores`` [batch, heads, queries, keys] times ``layer_scale``, plus mask
    and alibi, written over the scores. A mask or alibi of one dimension stands for none.

    With ``triangular``, query ``i`` sees the keys up to ``i``. A query that sees no key gets zeros.
    """
    batch, heads, queries, keys = attn_scores.shape
    mask = additive(attn_mask, batch, keys, attn_scores.dtype)
    if alibi.dim() > 1:
        rows = alibi.reshape(-1, heads * mp_size, 1, keys)[:, head_offset : head_offset + heads]
        mask = rows if mask is None else mask.float() + rows.float()
    if local_attention:
        hidden = out_of_window(queries, keys, window_size, attn_scores.device)
        mask = hidden if mask is None else mask.float() + hidden
    scores = attn_scores.contiguous()
    ops.softmax_(scores, mask, scale=layer_scale, causal=triangular)
    return scores


def additive(mask: Tensor, batch: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """DeepSpeed's mask, to be broadcast to [batch, heads, queries, keys]; None if it is no mask."""
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


def out_of_window(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Minus infinity for keys that are ``window`` or more before their query, 0 for others.

    If there are as many queries as keys, the first query stands at the first key. Otherwise
    DeepSpeed's kernel has the first query stand behind the last key.
    """
    at = torch.arange(queries, device=device).view(-1, 1) + (0 if queries == keys else keys)
    far = torch.arange(keys, device=device) <= at - window
    return torch.zeros(far.shape, device=device).masked_fill_(far, -torch.inf)


def _over(x: Tensor, result: Tensor) -> Tensor:
    return x.copy_(result) if x.is_contiguous() else result
