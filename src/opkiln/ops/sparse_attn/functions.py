"""``sparse_attn`` and its gradient: the ops and their references, which are dense. ``attention.py``
is the front end."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_same, widen
from opkiln.ops.sparse_attn.op import backward, forward

_Two = tuple[Tensor, Tensor]
_Three = tuple[Tensor, Tensor, Tensor]


@forward.op()
def sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor,
    lists: list[Tensor],
    key_bias: Tensor | None,
    mask: Tensor | None,
    block: int,
    scale: float,
    causal: bool,
    window: int,
    multiply: bool,
) -> _Two:
    """Attention over the blocks that ``layout`` names, and the logarithm of each query's sum.

    ``layout``, bool [heads or 1, blocks, blocks], and what follows it up to ``window`` are those of
    ``SparsePlan``; the last block may be shorter.

    The score of a key is ``scale * (q @ k)``, plus ``key_bias``, fp32 [batch, tokens], plus
    ``mask``, [batch, heads, tokens, tokens] in the dtype of ``q``, which may be expanded. With
    ``multiply``, keys where ``mask`` is 0 are not seen, and nothing is added.

    The second result, fp32 [batch, heads, tokens], has the logarithm of the sum of the exponentials
    of the scores. A query that sees no key gives zeros, and infinity there.
    """
    del lists  # for kernels
    check_same(q, "q", k=k, v=v)
    scores = _scores(q, k, layout, key_bias, mask, block, scale, causal, window, multiply)
    total = torch.logsumexp(scores, -1, keepdim=True)
    total = total.masked_fill(total == -torch.inf, torch.inf)
    out = torch.exp(scores - total) @ widen(v)
    return _like(q, out), total.squeeze(-1)


@sparse_attn.fake
def _(q: Tensor, *_: object) -> _Two:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=dtype)


@sparse_attn.backward
def _(
    grad: Tensor | None, _lse_grad: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rules: Any,
    output: _Two,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of ``q``, ``k`` and ``v``. The masks have none, and neither has the logarithm."""
    if grad is None:
        return (None,) * 12
    return (*sparse_attn_backward(fitting(grad), q, k, v, *output, *rules), *(None,) * 9)


@backward.op()
def sparse_attn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: Tensor,
    lists: list[Tensor],
    key_bias: Tensor | None,
    mask: Tensor | None,
    block: int,
    scale: float,
    causal: bool,
    window: int,
    multiply: bool,
) -> _Three:
    """The gradients of ``q``, ``k`` and ``v`` in ``sparse_attn``, whose results are ``out`` and
    ``lse``. They are the same to the bit each time."""
    del lists  # for kernels
    wide = widen(grad)
    scores = _scores(q, k, layout, key_bias, mask, block, scale, causal, window, multiply)
    weights = torch.exp(scores - lse[..., None])
    inner = (wide * widen(out)).sum(-1, keepdim=True)
    of_scores = weights * (wide @ widen(v).mT - inner) * scale
    return (
        _like(q, of_scores @ widen(k)),
        _like(k, of_scores.mT @ widen(q)),
        _like(v, weights.mT @ wide),
    )


@sparse_attn_backward.fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> _Three:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def fitting(x: Tensor) -> Tensor:
    """``x``, or a copy whose rows the kernels can read: each begins at a multiple of 16 bytes."""
    of_16_bytes = 16 // x.element_size()
    fits = x.dim() == 4 and x.stride(3) == 1 and x.stride(2) > 0
    fits = fits and all(each % of_16_bytes == 0 for each in x.stride()[:3])
    if fits and not torch.compiler.is_compiling():  # it cannot be traced; the op itself looks again
        fits = x.storage_offset() % of_16_bytes == 0
    return x if fits else x.contiguous()


def visible(layout: Tensor, block: int, tokens: int, causal: bool, window: int) -> Tensor:
    """Which query sees which key: bool [heads or 1, tokens, tokens]."""
    seen = layout.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :tokens, :tokens]
    if causal or window:
        place = torch.arange(tokens, device=layout.device)
        ahead = place[:, None] - place
        if causal:
            seen = seen & (ahead >= 0)
        if window:
            seen = seen & (ahead.abs() < window)
    return seen


def _scores(
    q: Tensor, k: Tensor, layout: Tensor, key_bias: Tensor | None, mask: Tensor | None, block: int,
    scale: float, causal: bool, window: int, multiply: bool,
) -> Tensor:  # fmt: skip
    check("q", q, dims=4)
    batch, heads, tokens, _ = q.shape
    blocks = -(-tokens // block)
    if layout.shape[0] not in (1, heads) or layout.shape[1:] != (blocks, blocks):
        raise RuntimeError(
            f"layout has shape {list(layout.shape)}, expected [{heads} or 1, {blocks}, {blocks}]"
        )
    check("layout", layout, at=q, of="q")
    if scale <= 0:
        raise RuntimeError(f"scale is {scale:g}, expected more than 0")
    scores = (widen(q) @ widen(k).mT) * scale
    if key_bias is not None:
        check("key_bias", key_bias, shape=[batch, tokens])
        scores = scores + key_bias[:, None, None].to(scores.dtype)
    seen = visible(layout, block, tokens, causal, window)
    if mask is not None:
        check("mask", mask, like=q, of="q", shape=[batch, heads, tokens, tokens])
        if multiply:
            seen = seen & (mask != 0)
        else:
            scores = scores + widen(mask)
    return scores.masked_fill(~seen, -math.inf)


def _like(x: Tensor, value: Tensor) -> Tensor:
    """``value`` with the dtype and the strides that a new tensor like ``x`` has."""
    return torch.empty_like(x).copy_(value)
