"""The function of ``spatial_inference``: its body is the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import FLOATS, check, widen
from opkiln.ops.spatial_inference.op import kit


@kit.op()
def spatial_bias_add(
    x: Tensor,
    bias: Tensor,
    other: Tensor | None = None,
    other_bias: Tensor | None = None,
    channel_dim: int | None = None,
) -> Tensor:
    """``(x + bias) + (other + other_bias)``, with a bias for each channel.

    ``x`` is an image [N, C, H, W], or has its channels in the last dimension if it has another
    number of dimensions; ``channel_dim`` says otherwise. It may be fp32, bf16, fp16 or fp64.
    ``other`` has the shape of ``x``, the biases have C elements, and all have the same dtype and
    device. Sums of 16-bit elements are rounded once. The result has the memory format of ``x``,
    where that is contiguous or has the channels last (``torch.channels_last``). Otherwise it is
    contiguous. It is fastest if the channels come last. Raises RuntimeError, naming the argument.
    """
    check("x", x, *FLOATS)
    dim = _channels(x, channel_dim)
    if other is None and other_bias is not None:
        raise RuntimeError("other_bias is given without other")
    channels = [x.shape[dim]]
    for name, each, expected in (
        ("bias", bias, channels),
        ("other", other, [*x.shape]),
        ("other_bias", other_bias, channels),
    ):
        if each is not None:
            check(name, each, like=x, shape=expected)
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    out = widen(x) + widen(bias).view(shape)
    if other is not None:
        rest = widen(other)
        out = out + (rest if other_bias is None else rest + widen(other_bias).view(shape))
    kept = x.is_contiguous() or x.movedim(dim, -1).is_contiguous()
    like = torch.empty_like(x) if kept else x.new_empty(x.shape)
    out = out.to(x.dtype)
    return out if out.stride() == like.stride() else like.copy_(out)


@spatial_bias_add.backward
def _gradient(
    grad: Tensor,
    x: Tensor,
    bias: Tensor,
    other: Tensor | None,
    other_bias: Tensor | None,
    channel_dim: int | None,
) -> tuple[Tensor | None, ...]:
    dim = _channels(x, channel_dim)
    summed = None
    if bias.requires_grad or (other_bias is not None and other_bias.requires_grad):
        summed = grad.sum([each for each in range(x.dim()) if each != dim]) if x.dim() > 1 else grad
    return (
        grad,
        summed,
        None if other is None else grad,
        None if other_bias is None else summed,
        None,
    )


def _channels(x: Tensor, channel_dim: int | None) -> int:
    """The dimension of the channels. Raises RuntimeError."""
    if channel_dim is None:
        channel_dim = 1 if x.dim() == 4 else -1
    if not -x.dim() <= channel_dim < x.dim():
        raise RuntimeError(f"x has shape {list(x.shape)}, so it has no dimension {channel_dim}")
    return channel_dim % x.dim()
