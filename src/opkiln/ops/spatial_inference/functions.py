"""The function of ``spatial_inference``: its body is the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.spatial_inference.op import kit

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    dim = _checked(x, bias, other, other_bias, channel_dim)
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.to(wide) + bias.to(wide).view(shape)
    if other is not None:
        rest = other.to(wide)
        out = out + (rest if other_bias is None else rest + other_bias.to(wide).view(shape))
    like = _result(x, dim)
    out = out.to(x.dtype)
    return out if out.stride() == like.stride() else like.copy_(out)


@spatial_bias_add.fake
def _shape(
    x: Tensor,
    bias: Tensor,
    other: Tensor | None = None,
    other_bias: Tensor | None = None,
    channel_dim: int | None = None,
) -> Tensor:
    return _result(x, _checked(x, bias, other, other_bias, channel_dim))


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


def _checked(
    x: Tensor,
    bias: Tensor,
    other: Tensor | None,
    other_bias: Tensor | None,
    channel_dim: int | None,
) -> int:
    """The dimension of the channels. Raises RuntimeError."""
    if x.dtype not in _DTYPES:
        raise RuntimeError(
            f"x has dtype {_name(x.dtype)}, expected float32, bfloat16, float16 or float64"
        )
    dim = _channels(x, channel_dim)
    if other is None and other_bias is not None:
        raise RuntimeError("other_bias is given without other")
    named = {"bias": bias, "other": other, "other_bias": other_bias}
    for name, each in named.items():
        if each is None:
            continue
        shape = x.shape if name == "other" else x.shape[dim : dim + 1]
        if each.shape != shape:
            raise RuntimeError(f"{name} has shape {list(each.shape)}, expected {list(shape)}")
        if each.dtype != x.dtype:
            raise RuntimeError(f"{name} has dtype {_name(each.dtype)}, x has {_name(x.dtype)}")
        if each.device != x.device:
            raise RuntimeError(f"{name} is on {each.device}, x is on {x.device}")
    return dim


def _result(x: Tensor, dim: int) -> Tensor:
    """Memory for the result."""
    if x.is_contiguous() or x.movedim(dim, -1).is_contiguous():
        return torch.empty_like(x)
    return x.new_empty(x.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
