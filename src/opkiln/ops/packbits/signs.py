"""The front end of ``packbits``: ``opkiln.quant.packbits`` and ``unpackbits``."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.checks import call_checked, check_dense
from opkiln.ops.packbits import functions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def packbits(x: Tensor) -> Tensor:
    """The signs of ``x`` (fp32, bf16 or fp16), eight to a uint8, the first in the highest bit.

    A bit is 1 where the sign bit is clear: minus zero is negative. The order is that of
    ``x.reshape(-1)``; missing bits of a last byte are 0. Raises UsageError.
    """
    check_dense(x)
    return call_checked(functions.packbits, x.detach().contiguous())


def unpackbits(
    packed: Tensor, shape: int | Sequence[int], *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """1 and -1 for the signs in ``packed``, in a tensor of this shape. Raises UsageError."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    numel = prod(sizes)
    if min(sizes, default=0) < 0 or packed.numel() != (numel + 7) // 8:
        raise ArgumentError(
            f"shape {sizes} takes {(numel + 7) // 8} bytes, packed has {packed.numel()}"
        )
    return call_checked(functions.unpackbits, packed.contiguous(), numel, dtype).view(sizes)
