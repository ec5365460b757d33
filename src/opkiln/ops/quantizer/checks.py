"""What the reference refuses, in the words of the native versions. Each raises RuntimeError."""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import check_flat

LARGEST_GROUP = 65536


def check_format(bits: int, group_size: int, prefix: str = "") -> None:
    if bits not in (4, 8):
        raise RuntimeError(f"{prefix}bits is {bits}, expected 4 or 8")
    if not 16 <= group_size <= LARGEST_GROUP or group_size % 8:
        raise RuntimeError(
            f"{prefix}group_size is {group_size}, expected a multiple of 8 from 16 to "
            f"{LARGEST_GROUP}"
        )


def check_offset(tensor: Tensor | None, device: torch.device) -> None:
    if tensor is not None:
        check_flat("offset_tensor", tensor, device, torch.int64, 1)


def check_quantized(
    index: str,
    values: Tensor,
    scales: Tensor,
    offsets: Tensor,
    numel: int,
    bits: int,
    group_size: int,
    symmetric: bool,
) -> None:
    if numel < 0:
        raise RuntimeError(f"numel is {numel}, expected at least 0")
    groups = -(-numel // group_size)
    levels = torch.int8 if symmetric and bits == 8 else torch.uint8
    for name, tensor, dtype, count in (
        ("values", values, levels, numel if bits == 8 else (numel + 1) // 2),
        ("scales", scales, torch.float32, groups),
        ("offsets", offsets, torch.float32, 0 if symmetric else groups),
    ):
        check_flat(f"{name}{index}", tensor, values.device, dtype, count)
