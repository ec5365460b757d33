"""Softmax of attention scores ``[batch, heads, queries, keys]``, or of fewer dimensions.

The score of query ``i`` for key ``j`` is ``x * scale + mask + slopes[head] * (j - i - offset)``.
``mask`` is broadcast to the shape of ``x`` and has its dtype, or is fp32. ``slopes`` (alibi) are
fp32, ``[heads]``. ``offset`` is the position of the first query among the keys: with a cache of
``n`` older keys it is ``n``. With ``causal`` a query sees the keys up to its own position. With a
``window`` it sees the keys less than ``window`` positions away.

A row that sees nothing, because all its scores are minus infinity or hidden, is all zeros, as
torch's ``scaled_dot_product_attention`` has it (``torch.softmax`` gives NaN). A NaN, or a score of
plus infinity, makes its row NaN. What is hidden may have any value. 16-bit scores are computed in
fp32 and rounded once. The result is contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_least, widen
from opkiln.ops.transformer_inference.op import softmax as kit


@kit.op()
def softmax(
    x: Tensor,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    offset: int = 0,
    window: int = 0,
) -> Tensor:
    """The softmax over the keys: fp32, fp16 or bf16. The module says what the arguments are."""
    if not 1 <= x.dim() <= 4:
        raise RuntimeError(
            f"x has shape {list(x.shape)}, expected at most [batch, heads, queries, keys]"
        )
    check_least(0, window=window)
    scores = widen(x) * scale
    if mask is not None:
        if mask.dtype != torch.float32:
            check("mask", mask, like=x)
        sizes = zip(mask.shape[::-1], x.shape[::-1], strict=False)
        if mask.dim() > x.dim() or any(one not in (1, other) for one, other in sizes):
            raise RuntimeError(
                f"mask has shape {list(mask.shape)}, which cannot be broadcast to {list(x.shape)}"
            )
        scores = scores + widen(mask)
    if slopes is not None:
        check("slopes", slopes, shape=[x.shape[-3] if x.dim() > 2 else 1])
        scores = scores + slopes.view(-1, 1, 1) * _distance(x, offset)
    if causal or window:
        distance = _distance(x, offset)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden = hidden | (distance > 0)
        if window:
            hidden = hidden | (distance.abs() >= window)
        scores = scores.masked_fill(hidden.view(hidden.shape[-x.dim() :]), -torch.inf)
    if x.numel() == 0:
        return scores.to(x.dtype).contiguous()
    most = scores.detach().amax(-1, keepdim=True)
    powers = torch.exp(scores - most.masked_fill(most == -torch.inf, 0))
    total = powers.sum(-1, keepdim=True)
    return (powers / total.masked_fill(total == 0, 1)).to(x.dtype).contiguous()


@kit.op(mutates="x")
def softmax_(
    x: Tensor,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    offset: int = 0,
    window: int = 0,
) -> None:
    """``softmax``, written over ``x``, whose last stride is 1."""
    if x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise RuntimeError(f"x has strides {list(x.stride())}, expected 1 as the last")
    x.copy_(softmax.reference(x, mask, slopes, scale, causal, offset, window))


@softmax.backward
def _softmax_backward(
    grad: Tensor,
    x: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    _causal: bool,
    offset: int,
    _window: int,
    output: Tensor,
) -> tuple[Tensor | None, ...]:
    wide, out = widen(grad), widen(output)
    scores = (wide - (wide * out).sum(-1, keepdim=True)) * out
    of_mask = of_slopes = None
    if mask is not None:
        of_mask = scores.sum_to_size(mask.shape).to(mask.dtype)
    if slopes is not None:
        products = scores * _distance(x, offset)
        of_slopes = products.view(-1, *products.shape[-3:]).sum((0, 2, 3)).to(slopes.dtype)
    return (scores * scale).to(x.dtype), of_mask, of_slopes, None, None, None, None


def _distance(x: Tensor, offset: int) -> Tensor:
    """From each query to each key."""
    queries = x.shape[-2] if x.dim() > 1 else 1
    rows = torch.arange(queries, device=x.device).view(-1, 1)
    return torch.arange(x.shape[-1], device=x.device) - rows - offset
