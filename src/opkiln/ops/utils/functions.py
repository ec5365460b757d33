"""The functions of the library; their bodies are the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.checks import check_on, dtype_name
from opkiln.ops.utils.op import kit


@kit.op(gradient=False)
def flatten_list(tensors: list[Tensor]) -> Tensor:
    """``opkiln.utils.flatten``. Raises RuntimeError."""
    check_list(tensors)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@kit.op(mutates="tensors")
def unflatten_list_(tensors: list[Tensor], flat: Tensor) -> None:
    """``opkiln.utils.unflatten_into``. Raises RuntimeError before anything is written. (The native
    versions also refuse tensors that are not contiguous.)"""
    check_list(tensors, flat=flat)
    count = sum(tensor.numel() for tensor in tensors)
    if flat.numel() != count:
        raise RuntimeError(f"flat has {flat.numel()} elements, tensors have {count}")
    start = 0
    source = flat.detach().reshape(-1)
    for tensor in tensors:
        tensor.copy_(source[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def check_list(tensors: list[Tensor], **others: Tensor) -> None:
    """All have one dtype and are on one device. Raises RuntimeError."""
    if not tensors:
        raise RuntimeError("tensors is empty, expected at least one")
    first = tensors[0]
    named = {f"tensors[{i}]": tensor for i, tensor in enumerate(tensors)}
    for name, tensor in {**named, **others}.items():
        check_on(name, tensor, first.device)
        if tensor.dtype != first.dtype:
            raise RuntimeError(
                f"{name} has dtype {dtype_name(tensor.dtype)}, expected that of tensors[0], "
                f"{dtype_name(first.dtype)}"
            )
