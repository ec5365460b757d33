"""Tensors that a flat kernel can walk in step: those of one index laid out alike in memory."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor


class Staged(NamedTuple):
    """A parameter with gaps between its elements, and the contiguous copy to be stepped instead."""

    param: Tensor
    contiguous: Tensor

    def write_back(self) -> None:
        self.param.copy_(self.contiguous)


class Laid(NamedTuple):
    """The lists as a kernel takes them, and what is to be written back after it."""

    lists: list[list[Tensor]]
    staged: list[Staged]


def lay_out_alike(
    params: list[Tensor], *others: list[Tensor], in_rows: bool = False
) -> Laid | None:
    """The lists with a copy in place of each tensor whose layout is not its parameter's.

    None when all are contiguous: then there is nothing to do. A dense parameter (channels-last,
    say) decides the layout of the others, unless all must lie ``in_rows``; one with gaps is staged.
    Tensors of another shape than their parameter's are left alone.
    """
    if all(map(Tensor.is_contiguous, chain(params, *others))):
        return None
    staged: list[Staged] = []
    rows = []
    for param, *rest in zip(params, *others, strict=True):
        # empty_like keeps the strides of a dense tensor, whatever the order of its dimensions.
        dense = torch.empty_like(param, device="meta").stride() == param.stride()
        if param.is_contiguous() or (dense and not in_rows):
            model = param
        else:
            model = param.contiguous()
            staged.append(Staged(param, model))
        rows.append([model, *(_like(model, tensor) for tensor in rest)])
    return Laid([list(column) for column in zip(*rows, strict=True)], staged)


def _like(model: Tensor, tensor: Tensor) -> Tensor:
    if tensor.shape != model.shape or tensor.stride() == model.stride():
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
