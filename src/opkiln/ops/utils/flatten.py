"""The front end of ``utils``: ``opkiln.utils``'s functions on lists of tensors."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.ops.checks import call_checked, check_dense
from opkiln.ops.utils import functions
from opkiln.ops.utils.functions import check_list, unflatten_list_

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A new tensor of one dimension with the elements of all, one tensor after the other.

    They are of one dtype and on one device; at least one. Raises UsageError, naming the tensor.
    """
    listed = _detached(tensors)
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return torch.cat([each.reshape(-1) for each in tensors])  # with its gradient
    return call_checked(functions.flatten_list, listed)


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
    count = sum(tensor.numel() for tensor in like)
    if flat.numel() != count:
        raise ArgumentError(f"flat has {flat.numel()} elements, the tensors have {count}")
    views, start = [], 0
    for tensor in like:
        views.append(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return views


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the parts of ``flat`` to the tensors: the inverse of ``flatten``.

    Raises UsageError, before anything is written, where dtypes, devices or sizes differ.
    """
    listed = _detached(tensors)
    if all(tensor.is_contiguous() for tensor in listed):
        call_checked(functions.unflatten_list_, listed, flat.detach())
    else:  # kernels write to whole stretches of memory
        call_checked(unflatten_list_.reference, listed, flat)


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


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    for i, tensor in enumerate(tensors):
        check_dense(tensor, f"tensors[{i}]")
    listed = [tensor.detach() for tensor in tensors]
    call_checked(check_list, listed)
    return listed
