"""What the references of the host optimizers share: checks of the lists, types, exact factors."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def check_lists(lists: Mapping[str, list[Tensor]], copies: list[Tensor]) -> None:
    """Raises RuntimeError for a list or tensor that does not go with the first list's.

    ``lists`` is by the op's argument names, the parameters first; ``copies`` may be empty.
    """
    named = {**lists, "copies": copies} if copies else lists
    (first, params), *_ = named.items()
    for name, tensors in named.items():
        check_length(name, tensors, first, params)
        for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
            check_tensor(f"{name}[{i}]", tensor)
            check_size(f"{name}[{i}]", tensor, f"{first}[{i}]", param)


def check_length(name: str, tensors: list[Tensor], first: str, params: list[Tensor]) -> None:
    """Raises RuntimeError for lists of different lengths."""
    if len(tensors) != len(params):
        raise RuntimeError(f"{name} has {len(tensors)} tensors, {first} has {len(params)}")


def check_tensor(where: str, tensor: Tensor) -> None:
    """Raises RuntimeError for a tensor that is not dense or not of a floating type."""
    if not tensor.is_floating_point():
        raise RuntimeError(f"{where} has dtype {tensor.dtype}, expected floating point")
    if tensor.layout != torch.strided:
        raise RuntimeError(f"{where} is not dense: its layout is {tensor.layout}")


def check_size(where: str, tensor: Tensor, there: str, param: Tensor) -> None:
    """Raises RuntimeError for a tensor that cannot be walked in step with its parameter."""
    if tensor.numel() != param.numel():
        raise RuntimeError(f"{where} has {tensor.numel()} elements, {there} has {param.numel()}")
    if tensor.shape != param.shape and not tensor.is_contiguous():
        raise RuntimeError(
            f"{where} and {there} are laid out differently: "
            f"shapes {tuple(tensor.shape)} and {tuple(param.shape)}, gaps in the first"
        )


def check_step(step: int) -> None:
    """Raises RuntimeError for a step before the first."""
    if step < 1:
        raise RuntimeError(f"step is {step}, expected at least 1")


def grad_factor(grad_scale: float, maximize: bool) -> float:
    """What gradients are multiplied with. Raises RuntimeError for a scale of 0."""
    if grad_scale == 0:
        raise RuntimeError("grad_scale is 0, expected a divisor")
    return (-1 if maximize else 1) / grad_scale


def wide(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor itself where its type is the one to compute in, otherwise a wider copy."""
    return tensor.to(torch.promote_types(like.dtype, torch.float32)).view(like.shape)


def scaled(grad: Tensor, like: Tensor, factor: float) -> Tensor:
    """The gradient times the factor, a new tensor of the type and shape of ``like``."""
    return grad.to(like.dtype).reshape(like.shape) * factor


def store(value: Tensor, tensor: Tensor, copy: Tensor | None = None) -> None:
    """The value into the tensor, rounded once; then the tensor into the copy."""
    if value.dtype != tensor.dtype:
        tensor.copy_(value.view(tensor.shape))
    if copy is not None:
        copy.copy_(tensor.view(copy.shape))


def multiply_(tensor: Tensor, factor: float, plus: Tensor | None = None) -> Tensor:
    """In place, by a factor near 1 as the sum of two numbers that fp32 holds well.

    ``plus`` is added before the last rounding: a small constant, added to numbers that are rounded
    already, would always be rounded to the same side.

    Rounded to fp32 as a whole it would be off by up to 3e-8, always to the same side, which a
    hundred steps add up to more than 1e-6. The first part has few bits and the second is not small:
    so their products' errors fall to both sides. Both are positive: infinity stays infinity.
    """
    high = max(math.ceil(factor * 256) - 2, 0) / 256
    low = tensor * (factor - high)
    if plus is not None:
        low.add_(plus)
    return tensor.mul_(high).add_(low)


def refuse_to_keep(op: str) -> NoReturn:
    """Raises RuntimeError: who has a reference has nothing to gain from lists that are kept."""
    raise RuntimeError(f"{op} keeps lists with its native version alone")
