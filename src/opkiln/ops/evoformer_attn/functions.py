"""``evoformer_attention`` and its gradient: the ops and their references. ``attention.py``, the
front end, says what the arguments are.

All have one dtype. 16-bit tensors are computed in fp32, and results are rounded once; a kernel also
rounds weights and their gradients to the dtype, because tensor cores take them so.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_same, widen
from opkiln.ops.evoformer_attn.op import backward, forward

_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@forward.op()
def evoformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The attention, and what its gradient needs.

    The second result is [2, batch, rows, heads, length] in fp32: for each query the greatest score,
    times log2(e), or a number up to 8 below it, and one over the sum of the weights relative to it.
    (Their sum as one number would lose the second where the first is -1e9, in rows that are masked
    out.) If all scores of a query are minus infinity, its result is NaN.
    """
    scores = _scores(q, k, v, scale, mask_bias, pair_bias)
    if scores.shape[-1] == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format), _moments(q)
    greatest = scores.amax(-1)
    weights = (scores - greatest[..., None]).exp()
    share = weights.sum(-1).reciprocal()
    out = torch.einsum("bnhqk,bnkhd->bnqhd", weights * share[..., None], widen(v))
    return out.to(q.dtype).contiguous(), torch.stack([greatest * math.log2(math.e), share])


@evoformer_attention.fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), _moments(q)


@evoformer_attention.backward
def _(
    grad: Tensor, _of_moments: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, output: Any
) -> tuple[Tensor | None, ...]:
    wanted = [each is not None and each.requires_grad for each in rest[:2]]
    gradients: Any = evoformer_attention_backward
    if torch.is_grad_enabled():  # for a second derivative, which goes through ``output``, too
        output = evoformer_attention.reference(q, k, v, *rest)
        gradients = evoformer_attention_backward.reference
    *found, of_mask, of_pair = gradients(grad, q, k, v, *output, *rest, *wanted)
    return *found, of_mask if wanted[0] else None, of_pair if wanted[1] else None, None


@backward.op()
def evoformer_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    moments: Tensor,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float,
    mask_grad: bool,
    pair_grad: bool,
) -> _Five:
    """The gradients of ``q``, ``k``, ``v`` and of the two biases in ``evoformer_attention``, whose
    results are ``output`` and ``moments``. ``grad`` is that of ``output``. A gradient of a bias
    that is not wanted is an empty tensor. Kernels add in a fixed order: results are the same to the
    bit each time."""
    scores = _scores(q, k, v, scale, mask_bias, pair_bias) * math.log2(math.e)
    greatest, share = moments.unbind()
    weights = torch.exp2(scores - greatest[..., None]) * share[..., None]
    wide, queries, keys = widen(grad), widen(q), widen(k)
    v_grad = torch.einsum("bnhqk,bnqhd->bnkhd", weights, wide)
    delta = (wide * widen(output)).sum(-1).transpose(2, 3)[..., None]
    through = weights * (torch.einsum("bnqhd,bnkhd->bnhqk", wide, widen(v)) - delta)
    q_grad = torch.einsum("bnhqk,bnkhd->bnqhd", through, keys) * scale
    k_grad = torch.einsum("bnhqk,bnqhd->bnkhd", through, queries) * scale
    of_mask = through.sum((2, 3), keepdim=True) if mask_grad else through.new_empty(0)
    of_pair = through.sum(1, keepdim=True) if pair_grad else through.new_empty(0)
    results = (q_grad, k_grad, v_grad, of_mask, of_pair)
    return tuple(each.to(q.dtype).contiguous() for each in results)  # type: ignore[return-value]


@evoformer_attention_backward.fake
def _(_grad: Tensor, q: Tensor, *rest: Any) -> _Five:
    batch, rows, length, heads, _ = q.shape
    mask_grad, pair_grad = rest[-2:]
    of_q, of_k, of_v = (q.new_empty(q.shape) for _ in range(3))
    of_mask = q.new_empty((batch, rows, 1, 1, length) if mask_grad else (0,))
    of_pair = q.new_empty((batch, 1, heads, length, length) if pair_grad else (0,))
    return of_q, of_k, of_v, of_mask, of_pair


def _scores(q: Tensor, k: Tensor, v: Tensor, scale: float, *biases: Tensor | None) -> Tensor:
    mask_bias, pair_bias = biases
    check("q", q, dims=5)
    check_same(q, "q", k=k, v=v)
    batch, rows, length, heads, _ = q.shape
    scores = torch.einsum("bnqhd,bnkhd->bnhqk", widen(q), widen(k)) * scale
    for name, bias, shape in (
        ("mask_bias", mask_bias, [batch, rows, 1, 1, length]),
        ("pair_bias", pair_bias, [batch, 1, heads, length, length]),
    ):
        if bias is not None:
            check(name, bias, like=q, of="q", shape=shape)
            scores = scores + widen(bias)
    return scores


def _moments(q: Tensor) -> Tensor:
    batch, rows, length, heads, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((2, batch, rows, heads, length), dtype=dtype)
