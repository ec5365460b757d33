"""The functions of the library; their bodies are the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import check_flat, check_least, check_native
from opkiln.ops.packbits.op import kit


@kit.op(gradient=False)
def packbits(x: Tensor) -> Tensor:
    """``opkiln.quant.packbits``: NaN has a sign, too. Raises RuntimeError for another dtype than
    fp32, bf16 and fp16."""
    check_native("x has dtype", x.dtype)
    # Not torch.signbit: on a GPU that of a 16-bit NaN is false.
    whole = torch.int32 if x.dtype == torch.float32 else torch.int16
    bits = x.reshape(-1).view(whole) >= 0
    bits = torch.cat([bits, bits.new_zeros(-bits.numel() % 8)]).view(-1, 8)
    places = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.int32, device=x.device)
    return (bits * places).sum(1).to(torch.uint8)


@kit.op(gradient=False)
def unpackbits(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """1 for each bit that is set and -1 for each that is not, ``numel`` of them in one dimension.
    Raises RuntimeError for another dtype, and for a ``packed`` that is not as many bytes."""
    check_native("dtype is", dtype)
    check_least(0, numel=numel)
    check_flat("packed", packed, packed.device, torch.uint8, (numel + 7) // 8)
    places = torch.arange(7, -1, -1, dtype=torch.int32, device=packed.device)
    bits = packed.reshape(-1, 1).to(torch.int32) >> places & 1
    return (bits.view(-1)[:numel] * 2 - 1).to(dtype)
