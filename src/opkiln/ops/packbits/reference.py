"""``packbits`` in pure PyTorch: what serves where nothing native does, and what tests see."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMES = {
    torch.float64: "Double", torch.int8: "Char", torch.uint8: "Byte", torch.int16: "Short",
    torch.int32: "Int", torch.int64: "Long", torch.bool: "Bool", torch.float32: "Float",
    torch.bfloat16: "BFloat16", torch.float16: "Half",
}  # fmt: skip


def packbits(x: Tensor) -> Tensor:
    """A bit for each element in the order of ``x.reshape(-1)``: 1 where its sign bit is clear.

    The first of eight is the highest bit of their byte, and bits of elements that a last byte lacks
    are 0. The sign is the sign bit: minus zero is negative, and NaN has a sign, too. Raises
    RuntimeError for a dtype other than fp32, bf16 and fp16.
    """
    if x.dtype not in _DTYPES:
        raise RuntimeError(
            f"x has dtype {_NAMES.get(x.dtype, x.dtype)}, expected Float, BFloat16 or Half"
        )
    # Not torch.signbit: on a GPU that of a 16-bit NaN is false.
    whole = torch.int32 if x.dtype == torch.float32 else torch.int16
    bits = x.reshape(-1).view(whole) >= 0
    bits = torch.cat([bits, bits.new_zeros(-bits.numel() % 8)]).view(-1, 8)
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.int32, device=x.device)
    return (bits * places).sum(1).to(torch.uint8)


def unpackbits(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """1 for each bit that is set and -1 for each that is not, ``numel`` of them in one dimension.

    Raises RuntimeError for another dtype than ``packbits`` takes, and where ``packed`` is not of
    uint8 and as many bytes as that takes.
    """
    if dtype not in _DTYPES:
        raise RuntimeError(f"dtype is {_NAMES.get(dtype, dtype)}, expected Float, BFloat16 or Half")
    if numel < 0:
        raise RuntimeError(f"numel is {numel}, expected at least 0")
    if packed.dtype != torch.uint8:
        raise RuntimeError(
            f"packed has dtype {_NAMES.get(packed.dtype, packed.dtype)}, expected Byte"
        )
    if packed.numel() != (numel + 7) // 8:
        raise RuntimeError(
            f"packed has {packed.numel()} elements, expected {(numel + 7) // 8}"
        )  # fmt: skip
    places = torch.arange(7, -1, -1, dtype=torch.int32, device=packed.device)
    bits = packed.reshape(-1, 1).to(torch.int32) >> places & 1
    return (bits.view(-1)[:numel] * 2 - 1).to(dtype)
