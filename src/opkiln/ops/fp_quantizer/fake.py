"""What ``fp_quantizer``'s functions return, without the contents: for tracing."""

from __future__ import annotations

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


def fp_dequantize(
    codes: Tensor,
    scales: Tensor,  # noqa: ARG001
    size: list[int],
    group_size: int,  # noqa: ARG001
    bits: int,  # noqa: ARG001
    mantissa_bits: int,  # noqa: ARG001
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty(size, dtype=dtype)


def fp_dequantize_rows(
    codes: Tensor,
    scales: Tensor,  # noqa: ARG001
    rows: Tensor,
    size: list[int],
    group_size: int,  # noqa: ARG001
    bits: int,  # noqa: ARG001
    mantissa_bits: int,  # noqa: ARG001
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((rows.numel(), *size[1:]), dtype=dtype)
