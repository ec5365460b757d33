"""Rotary position embedding: what the references of two ops share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_float, check_same, check_within, widen


def cos_and_sin(
    positions: Tensor,
    pairs: int,
    cos: Tensor | None,
    sin: Tensor | None,
    theta: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for each position, [..., 1, pairs]: rows of the tables ``cos`` and ``sin``;
    without these, pair ``i`` turns by ``position * theta ** (-i / pairs)``. Raises RuntimeError."""
    if (cos is None) != (sin is None):
        raise RuntimeError("cos and sin are given together, or neither")
    if cos is not None and sin is not None:
        check_float("cos", cos, 2)
        check("cos", cos, at=positions, of="positions", shape=[cos.shape[0], pairs])
        check_same(cos, "cos", sin=sin)
        check_within("positions", positions, 0, cos.shape[0] - 1)
        return widen(cos)[positions][..., None, :], widen(sin)[positions][..., None, :]
    if theta <= 0:
        raise RuntimeError(f"theta is {theta:g}, expected a positive number")
    steps = torch.arange(pairs, device=positions.device, dtype=torch.float64)
    angle = positions.double()[..., None, None] * torch.exp(steps * (-math.log(theta) / pairs))
    exact = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(exact), angle.sin().to(exact)


def rotate(x: Tensor, c: Tensor, s: Tensor, interleaved: bool = False) -> Tensor:
    """The first elements of each head rotated, as many as the cosines and sines are for."""
    count = 2 * c.shape[-1]
    wide, rest = widen(x[..., :count]), x[..., count:]
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
