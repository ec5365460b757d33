"""Shapes and types of what the functions return, for torch.compile."""

from typing import Any

import torch
from torch import Tensor

_Three = tuple[Tensor, Tensor, Tensor]


def quantize(x: Tensor, *rest: Any) -> _Three:
    return _quantize(x, x.numel(), *rest[:3])


def quantize_with_feedback(x: Tensor, _error: Tensor, *rest: Any) -> _Three:
    return quantize(x, *rest)


def dequantize(values: Tensor, _scales: Tensor, _offsets: Tensor, *rest: Any) -> Tensor:
    numel, dtype, *_ = rest
    return values.new_empty(numel, dtype=dtype)


def fake_quantize(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def fake_quantize_(*_: object) -> None:
    """Nothing is returned."""


def quantized_reduce(_values: list[Tensor], scales: list[Tensor], *rest: Any) -> _Three:
    _offsets, numel, *formats = rest
    return _quantize(scales[0], numel, *formats[4:7])


def quantized_reduce_with_feedback(_error: Tensor, *rest: Any) -> _Three:
    return quantized_reduce(*rest)


def _quantize(like: Tensor, numel: int, bits: int, group_size: int, symmetric: bool) -> _Three:
    groups = (numel + group_size - 1) // group_size
    signed = symmetric and bits == 8
    return (
        like.new_empty(
            numel if bits == 8 else (numel + 1) // 2, dtype=torch.int8 if signed else torch.uint8
        ),
        like.new_empty(groups, dtype=torch.float32),
        like.new_empty(0 if symmetric else groups, dtype=torch.float32),
    )
