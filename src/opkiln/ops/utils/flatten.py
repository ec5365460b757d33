"""The front end of ``utils``: ``opkiln.utils``'s functions on lists of tensors."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.ops.utils import functions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A new tensor of one dimension with the elements of all, one tensor after the other.

    They are of one dtype and on one device; at least one. Raises UsageError, naming the tensor.
    """
    listed = _check(tensors)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return torch.cat([each.reshape(-1) for each in tensors])  # with its gradient
    with torch.no_grad():
        return functions.flatten_list(listed)


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat`` with the shapes of these tensors, one after the other. Nothing is copied.

    Raises UsageError where ``flat`` is not of one dimension, not contiguous or of another size.
    """
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ArgumentError(
            f"flat has shape {tuple(flat.shape)} and strides {flat.stride()}, expected one "
            "dimension without gaps",
            hint="flat.reshape(-1)",
        )
    _check_count(flat, like)
    views, start = [], 0
    for tensor in like:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return views


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of ``flat`` to the tensors: the inverse of ``flatten``.

    Raises UsageError, before anything is written, where dtypes, devices or sizes differ.
    """
    listed = _check(tensors)
    _check_alike("flat", flat, listed[0])
    _check_count(flat, listed)
    with torch.no_grad():
        if all(tensor.is_contiguous() for tensor in listed):
            functions.unflatten_list_(listed, flat.detach())
            return
        # The op writes to whole stretches of memory; others are given theirs one by one.
        for tensor, part in zip(listed, unflatten(flat.detach().reshape(-1), listed), strict=True):
            tensor.copy_(part)


def byte_view(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes, in one dimension: a view. Raises UsageError."""
    if not tensor.is_contiguous():
        raise ArgumentError("tensor is not contiguous", hint="tensor.contiguous()")
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return flat.new_empty(0, dtype=torch.uint8)
    return flat.view(torch.uint8)


def from_bytes(memory: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Bytes as a tensor of this dtype and shape: a view, the inverse of ``byte_view``.

    Raises UsageError where they are not as many, or not aligned to the elements' size.
    """
    wanted = prod(shape) * dtype.itemsize
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise ArgumentTypeError(
            f"memory has dtype {memory.dtype} and shape {tuple(memory.shape)}, expected uint8 of "
            "one dimension without gaps"
        )
    if memory.numel() != wanted:
        raise ArgumentError(
            f"memory has {memory.numel()} bytes, {tuple(shape)} of {dtype} {wanted}"
        )
    if wanted == 0:
        return memory.new_empty(tuple(shape), dtype=dtype)
    if memory.data_ptr() % dtype.itemsize or memory.storage_offset() % dtype.itemsize:
        raise ArgumentError(
            f"memory starts at byte {memory.storage_offset()} of its storage, expected a multiple "
            f"of {dtype.itemsize}, the size of {dtype}",
            hint="memory.clone()",
        )
    return memory.view(dtype).view(tuple(shape))


def _check(tensors: Sequence[Tensor]) -> list[Tensor]:
    listed = [tensor.detach() for tensor in tensors]
    if not listed:
        raise ArgumentError("tensors is empty, expected at least one")
    for i, tensor in enumerate(listed):
        if tensor.layout != torch.strided:
            raise ArgumentError(f"tensors[{i}] is not dense: its layout is {tensor.layout}")
        _check_alike(f"tensors[{i}]", tensor, listed[0])
    return listed


def _check_alike(name: str, tensor: Tensor, first: Tensor) -> None:
    for what, ours, theirs in (
        ("dtype", tensor.dtype, first.dtype), ("device", tensor.device, first.device),
    ):  # fmt: skip
        if ours != theirs:
            raise ArgumentTypeError(
                f"{name} has {what} {ours}, expected that of tensors[0], {theirs}"
            )


def _check_count(flat: Tensor, like: Sequence[Tensor]) -> None:
    count = sum(tensor.numel() for tensor in like)
    if flat.numel() != count:
        raise ArgumentError(f"flat has {flat.numel()} elements, the tensors have {count}")
