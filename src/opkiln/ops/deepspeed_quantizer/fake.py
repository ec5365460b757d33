"""Shapes and types of what the functions return, for torch.compile."""
# ruff: noqa: ARG001 (the arguments are those of the schemas)

from __future__ import annotations

import torch
from torch import Tensor


def deepspeed_quantize(
    x: Tensor, groups: int, bits: int, symmetric: bool, *_: object
) -> tuple[Tensor, Tensor]:
    return _quantized(x, x.numel(), groups, bits, symmetric)


def deepspeed_dequantize(
    levels: Tensor, params: Tensor, groups: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> Tensor:
    return levels.new_empty(levels.numel() * 8 // bits, dtype=dtype)


def deepspeed_reduce(
    levels: Tensor, params: Tensor, parts: int, in_groups: int, out_groups: int, bits: int,
    symmetric: bool, with_zero: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    elements = levels.numel() * 8 // bits // parts
    return _quantized(levels, elements, out_groups, bits, symmetric)


def _quantized(
    like: Tensor, elements: int, groups: int, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    return (
        like.new_empty(elements * bits // 8, dtype=torch.int8),
        like.new_empty((groups, 1 if symmetric else 2), dtype=torch.float32),
    )
