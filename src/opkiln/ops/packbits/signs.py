"""The front end of ``packbits``: ``opkiln.quant.packbits`` and ``unpackbits``."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.ops.packbits.op import PackbitsBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def packbits(x: Tensor) -> Tensor:
    """The signs of ``x`` (fp32, bf16 or fp16), eight to a uint8, the first in the highest bit.

    A bit is 1 where the sign bit is clear: minus zero is negative. The order is that of
    ``x.reshape(-1)``; missing bits of a last byte are 0. Raises UsageError.
    """
    if x.dtype not in _DTYPES:
        raise ArgumentTypeError(f"x has dtype {x.dtype}, expected float32, bfloat16 or float16")
    if x.layout != torch.strided:
        raise ArgumentError(f"x is not dense: its layout is {x.layout}", hint="x.to_dense()")
    return _ops(x).packbits(x.detach().contiguous())  # type: ignore[no-any-return]


def unpackbits(
    packed: Tensor, shape: int | Sequence[int], *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """1 and -1 for the signs in ``packed``, in a tensor of this shape. Raises UsageError."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    numel = prod(sizes)
    if dtype not in _DTYPES:
        raise ArgumentTypeError(f"dtype is {dtype}, expected float32, bfloat16 or float16")
    if packed.dtype != torch.uint8:
        raise ArgumentTypeError(f"packed has dtype {packed.dtype}, expected uint8")
    if min(sizes, default=0) < 0 or packed.numel() != (numel + 7) // 8:
        raise ArgumentError(
            f"shape {sizes} takes {(numel + 7) // 8} bytes, packed has {packed.numel()}"
        )
    return _ops(packed).unpackbits(packed.contiguous(), numel, dtype).view(sizes)  # type: ignore[no-any-return]


def _ops(tensor: Tensor) -> Any:
    """The op's functions: native where there is a native version for the tensor's device."""
    return PackbitsBuilder.functions("cuda" if tensor.is_cuda else "cpu")
