"""What ``utils``'s functions return, without the contents: for tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def flatten_list(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))


def unflatten_list_(tensors: list[Tensor], flat: Tensor) -> None:
    del tensors, flat  # nothing changes its shape
