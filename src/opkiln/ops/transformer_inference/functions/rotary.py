"""Rotary position embedding of ``[batch, seq, heads, dim]`` or ``[seq, heads, dim]``, any strides.

The first ``dim`` elements of each head (all of them, if it is 0) are pairs of coordinates. Pair
``i`` of ``n`` is turned by ``position * theta ** (-i / n)``. Its coordinates are the elements ``i``
and ``n + i`` (GPT-NeoX, Llama), or ``2 * i`` and ``2 * i + 1`` with ``interleaved`` (GPT-J). The
other elements stay as they are.

``positions`` are int32 or int64, ``[batch, seq]`` or ``[seq]``; without them a sequence begins at
0. ``cos`` and ``sin``, both ``[positions, n]``, fp32 or 16-bit, replace ``theta``: a position is a
row of them. A position without a row is an error: on a GPU an assertion. ``inverse``
turns back.

Angles are exact to 2e-7 for every position. 16-bit elements are rotated in fp32 and rounded once.
A result has the strides that ``torch.empty_like`` gives. The tables get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.ops.checks import check_dtype, check_like
from opkiln.ops.rotating import cos_and_sin, rotate
from opkiln.ops.transformer_inference.op import rotary as kit

_MOST = 512  # elements of a head that are rotated without tables


@kit.op()
def rotary(
    x: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dim: int = 0,
    theta: float = 10000.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """``x`` rotated: fp32, fp16 or bf16. The module says what the arguments are."""
    angles = _angles(x, positions, cos, sin, dim, theta, inverse)
    out = torch.empty_like(x)
    return out.copy_(rotate(x, *angles, interleaved))


@kit.op(mutates="x")
def rotary_(
    x: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dim: int = 0,
    theta: float = 10000.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> None:
    """``rotary``, written over ``x``."""
    x.copy_(rotate(x, *_angles(x, positions, cos, sin, dim, theta, inverse), interleaved))


@kit.op()
def rotary_qk(
    q: Tensor,
    k: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dim: int = 0,
    theta: float = 10000.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rotary`` of queries and keys at once. They may have different numbers of heads."""
    _check_keys(q, k)
    angles = _angles(q, positions, cos, sin, dim, theta, inverse)
    return (
        torch.empty_like(q).copy_(rotate(q, *angles, interleaved)),
        torch.empty_like(k).copy_(rotate(k, *angles, interleaved)),
    )


@kit.op(mutates=("q", "k"))
def rotary_qk_(
    q: Tensor,
    k: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dim: int = 0,
    theta: float = 10000.0,
    interleaved: bool = False,
    inverse: bool = False,
) -> None:
    """``rotary_qk``, written over ``q`` and ``k``."""
    _check_keys(q, k)
    angles = _angles(q, positions, cos, sin, dim, theta, inverse)
    q.copy_(rotate(q, *angles, interleaved))
    k.copy_(rotate(k, *angles, interleaved))


@rotary.backward
def _rotary_backward(grad: Tensor, _x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    options = (*rest[:-1], not rest[-1])
    return (rotary(grad, *options), *[None] * 7)


@rotary_qk.backward
def _rotary_qk_backward(
    grad_q: Tensor, grad_k: Tensor, _q: Tensor, _k: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    options = (*rest[:-1], not rest[-1])
    return (*rotary_qk(grad_q, grad_k, *options), *[None] * 7)


def _angles(
    x: Tensor,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    dim: int,
    theta: float,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, ``[..., seq, 1, pairs]``. Raises RuntimeError."""
    if x.dim() not in (3, 4):
        raise RuntimeError(
            f"x has shape {list(x.shape)}, expected [batch, seq, heads, dim] or [seq, heads, dim]"
        )
    turned = dim or x.shape[-1]
    if not 0 < turned <= x.shape[-1] or turned % 2:
        raise RuntimeError(
            f"dim is {turned}, expected an even number from 2 to the size of a head, which is "
            f"{x.shape[-1]}"
        )
    seq = x.shape[-3]
    if positions is None:
        positions = torch.arange(seq, device=x.device)
    check_dtype("positions", positions, torch.int32, torch.int64)
    if positions.shape != x.shape[-3:-2] and positions.shape != x.shape[:-2]:
        raise RuntimeError(
            f"positions has shape {list(positions.shape)}, x has {list(x.shape)}: expected "
            "[batch, seq] or [seq]"
        )
    if cos is None and turned > _MOST:
        raise RuntimeError(f"dim is {turned}, and at most {_MOST} without tables cos and sin")
    c, s = cos_and_sin(positions, turned // 2, cos, sin, theta, x.dtype)
    return c, -s if inverse else s


def _check_keys(q: Tensor, k: Tensor) -> None:
    check_like("k", k, q, "q")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise RuntimeError(
            f"k has shape {list(k.shape)}, q has {list(q.shape)}: only heads may differ"
        )
