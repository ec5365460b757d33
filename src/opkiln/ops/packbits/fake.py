"""Shapes and types of what the functions return, for torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor


def packbits(x: Tensor) -> Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def unpackbits(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(numel, dtype=dtype)
