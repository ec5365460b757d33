"""Calls of ops that write to long lists of tensors: the layout they need, and their results.

An op raises an error for a wrong argument before it writes anything. Nothing here catches that,
because an error of a kernel looks the same. If nothing is wrong but another call is needed, that
is checked before the call, or the op returns a status.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Status(IntEnum):
    """The result of a step over kept lists. Nothing was written unless it is ``MADE``.

    The numbers are those of ``csrc/opkiln/optimizing/status.h``.
    """

    MADE = 0
    NOT_KEPT = 1  # the op keeps nothing for this call, perhaps because its library was replaced
    LAYOUT = 2  # a tensor is not laid out as the kept lists need it


def call_in_place(
    op: Callable[..., Any],
    lists: Sequence[list[Tensor]],
    written: Iterable[list[Tensor]],
    hyper: dict[str, Any],
) -> Any:
    """``op(*lists, **hyper)``, and its result. Then the versions of ``written`` are counted up,
    unless the result is a status that says that no step was made.

    Called directly, the op counts them up itself, in Python. That turns every list into Python
    objects and back, which takes a sixth of a step over ten thousand tensors. Here it comes after
    the call, when a GPU is already working.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():
        result = op(*lists, **hyper)
    if not result:
        for tensors in written:
            _count_up(tensors)
    return result


def _count_up(tensors: list[Tensor]) -> None:
    try:
        increment_version(tensors)
    except RuntimeError:
        # No kernel is called here. The only possible error says that a tensor was made in inference
        # mode and has no version. Checking each tensor first would take a tenth of a step over ten
        # thousand tensors, and such a tensor is very rare.
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def each_base_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors whose versions must be counted up so that each of these is counted up once. A
    view shares the version of its base."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        base = tensor if tensor._base is None else tensor._base
        found[id(base)] = base
    return list(found.values())


def same_tensors(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether the lists hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


class Laid(NamedTuple):
    """The lists in the layout that a kernel needs."""

    lists: list[list[Tensor]]
    # Parameters with gaps between their elements, and contiguous copies to be stepped instead.
    staged: list[tuple[Tensor, Tensor]]

    def write_back(self) -> None:
        """Write the copies that were stepped to their parameters."""
        for param, contiguous in self.staged:
            param.copy_(contiguous)


def lay_out_alike(
    params: list[Tensor], *others: list[Tensor], in_rows: bool = False
) -> Laid | None:
    """The lists with a copy in place of each tensor that is not laid out like its parameter.

    None if a kernel can walk the tensors as they are. A dense parameter (such as a channels-last
    one) decides the layout of the others, unless all must be ``in_rows``. A parameter with gaps is
    staged. Tensors of another shape than their parameter's are not changed: the op refuses them by
    name.
    """
    if all(map(Tensor.is_contiguous, chain(params, *others))):
        return None
    if not in_rows and all(param.is_contiguous() or _is_dense(param) for param in params):
        strides = list(map(Tensor.stride, params))
        if all(_have_strides(row, strides) for row in others):
            return None
    staged: list[tuple[Tensor, Tensor]] = []
    rows = []
    for param, *rest in zip(params, *others, strict=True):
        if param.is_contiguous() or (not in_rows and _is_dense(param)):
            model = param
        else:
            model = param.contiguous()
            staged.append((param, model))
        rows.append([model, *(_like(model, tensor) for tensor in rest)])
    return Laid([list(column) for column in zip(*rows, strict=True)], staged)


def _have_strides(tensors: list[Tensor], strides: list[tuple[int, ...]]) -> bool:
    """Whether these are the tensors' strides. One without elements may have any."""
    own = list(map(Tensor.stride, tensors))
    return own == strides or all(
        a == b or not tensor.numel() for a, b, tensor in zip(own, strides, tensors, strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a range of memory without gaps, in any order of dimensions."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True


def _like(model: Tensor, tensor: Tensor) -> Tensor:
    if tensor.shape != model.shape or tensor.stride() == model.stride():
        return tensor
    return torch.empty_like(model, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
