"""Rotary position embedding: what the references of two ops share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opkiln.ops.checks import widened


def cos_and_sin(
    positions: Tensor, pairs: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of the angles of each position, [..., pairs]: pair ``i`` turns by
    ``position * theta ** (-i / pairs)``. Raises RuntimeError."""
    if theta <= 0:
        raise RuntimeError(f"theta is {theta}, expected a positive number")
    steps = torch.arange(pairs, device=positions.device, dtype=torch.float64)
    angle = positions.double()[..., None] * torch.exp(steps * (-math.log(theta) / pairs))
    exact = dtype if dtype == torch.float64 else torch.float32
    return angle.cos().to(exact), angle.sin().to(exact)


def rotated(x: Tensor, c: Tensor, s: Tensor, interleaved: bool = False) -> Tensor:
    """The first elements of each head rotated, as many as the cosines and sines are for."""
    count = 2 * c.shape[-1]
    wide, rest = widened(x[..., :count]), x[..., count:]
    if interleaved:
        a, b = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
