"""Shapes and types of what the functions return, for torch.compile."""
# ruff: noqa: ARG001 (the arguments are those of the schemas)

import torch
from torch import Tensor

_Three = tuple[Tensor, Tensor, Tensor]


def quantize(
    x: Tensor, bits: int, group_size: int, symmetric: bool, *_: object, **__: object
) -> _Three:
    return _quantized(x, x.numel(), bits, group_size, symmetric)


def quantize_with_feedback(
    x: Tensor, error: Tensor, bits: int, group_size: int, symmetric: bool, *_: object, **__: object
) -> _Three:
    return _quantized(x, x.numel(), bits, group_size, symmetric)


def dequantize(
    values: Tensor,
    scales: Tensor,
    offsets: Tensor,
    numel: int,
    dtype: torch.dtype,
    *_: object,
    **__: object,
) -> Tensor:
    return values.new_empty(numel, dtype=dtype)


def fake_quantize(x: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(x)


def fake_quantize_(x: Tensor, *_: object, **__: object) -> None:
    return None


def quantized_reduce(
    values: list[Tensor],
    scales: list[Tensor],
    offsets: list[Tensor],
    numel: int,
    from_bits: int,
    from_group_size: int,
    from_symmetric: bool,
    factor: float,
    bits: int,
    group_size: int,
    symmetric: bool,
    *_: object,
    **__: object,
) -> _Three:
    return _quantized(scales[0], numel, bits, group_size, symmetric)


def quantized_reduce_with_feedback(error: Tensor, *args: object, **kwargs: object) -> _Three:
    return quantized_reduce(*args, **kwargs)  # type: ignore[arg-type]


def _quantized(like: Tensor, numel: int, bits: int, group_size: int, symmetric: bool) -> _Three:
    groups = (numel + group_size - 1) // group_size
    signed = symmetric and bits == 8
    return (
        like.new_empty(
            numel if bits == 8 else (numel + 1) // 2, dtype=torch.int8 if signed else torch.uint8
        ),
        like.new_empty(groups, dtype=torch.float32),
        like.new_empty(0 if symmetric else groups, dtype=torch.float32),
    )
