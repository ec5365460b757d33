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

from opkiln.ops.checks import WHOLE, check
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
    return _rotate((x,), positions, cos, sin, dim, theta, interleaved, inverse)[0]


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
    x.copy_(_rotate((x,), positions, cos, sin, dim, theta, interleaved, inverse)[0])


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
    turned, keys = _rotate((q, k), positions, cos, sin, dim, theta, interleaved, inverse)
    return turned, keys


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
    turned, keys = _rotate((q, k), positions, cos, sin, dim, theta, interleaved, inverse)
    q.copy_(turned)
    k.copy_(keys)


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


def _rotate(
    given: tuple[Tensor, ...], positions: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    dim: int, theta: float, interleaved: bool, inverse: bool,
) -> list[Tensor]:  # fmt: skip
    """Each of them rotated. Raises RuntimeError."""
    x = given[0]
    for k in given[1:]:
        check("k", k, like=x, of="q")
        if k.dim() != x.dim() or k.shape[:-2] != x.shape[:-2] or k.shape[-1] != x.shape[-1]:
            raise RuntimeError(
                f"k has shape {list(k.shape)}, q has {list(x.shape)}: only heads may differ"
            )
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
    check("positions", positions, *WHOLE)
    if positions.shape != x.shape[-3:-2] and positions.shape != x.shape[:-2]:
        raise RuntimeError(
            f"positions has shape {list(positions.shape)}, x has {list(x.shape)}: expected "
            "[batch, seq] or [seq]"
        )
    if cos is None and turned > _MOST:
        raise RuntimeError(f"dim is {turned}, and at most {_MOST} without tables cos and sin")
    c, s = cos_and_sin(positions, turned // 2, cos, sin, theta, x.dtype)
    s = -s if inverse else s
    return [torch.empty_like(each).copy_(rotate(each, c, s, interleaved)) for each in given]
