"""What ``fp_quantizer``'s functions return, without the contents: for tracing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.ops.fp_quantizer import formats


def fp_quantize(
    x: Tensor, group_size: int, bits: int, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    count = x.numel()
    return (
        x.new_empty(formats.byte_count(count, bits), dtype=torch.uint8),
        x.new_empty(formats.group_count(count, group_size), dtype=torch.float32),
    )


def fp_dequantize(codes: Tensor, _scales: Tensor, size: list[int], *rest: Any) -> Tensor:
    return codes.new_empty(size, dtype=rest[-1])


def fp_dequantize_rows(
    codes: Tensor, _scales: Tensor, rows: Tensor, size: list[int], *rest: Any
) -> Tensor:
    return codes.new_empty((rows.numel(), *size[1:]), dtype=rest[-1])
