"""What the references of these ops share: checks, numbers that only a device knows, storing.

Tensors of 16-bit types are computed on in fp32 and rounded once, when stored; fp32 and fp64 are
computed on as they are. Unlike the native versions these take any device, any strides and states
of any floating-point type. They never wait for a GPU, so they can be captured in a graph as well.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Numbers(NamedTuple):
    """For one count of steps, as fp64 tensors of no dimension."""

    step: Tensor  # the one to be made; the first is 1
    lr: Tensor
    grad_factor: Tensor  # 1 / grad_scale, negative to maximize


class Work(NamedTuple):
    """What is to be done, after every check."""

    numbers: list[Numbers]  # one, or one per parameter
    skip: Tensor | None  # where this is true, nothing is written

    def of(self, i: int) -> Numbers:
        return self.numbers[i % len(self.numbers)]


def prepared(
    lists: dict[str, list[Tensor]],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: float,
    maximize: bool,
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> Work:
    """``lists`` has the parameters, the gradients and the states, by their names in the schema.

    Raises RuntimeError when lists differ in length, tensors in size or device, or a tensor of one
    number has more.
    """
    params = lists["params"]
    _check_lists(lists, params, masters, steps)
    device = params[0].device if params else None
    for name, number in (
        ("lr_tensor", lr_tensor), ("grad_scale", grad_scale), ("found_inf", found_inf),
        *((f"steps[{i}]", step) for i, step in enumerate(steps)),
    ):  # fmt: skip
        if number is not None:
            _check_number(name, number, device)
    with torch.no_grad():
        return Work(
            [_numbers(step, lr, maximize, lr_tensor, grad_scale) for step in steps],
            None if found_inf is None else found_inf.reshape(()) != 0,
        )


def _numbers(
    made: Tensor,
    lr: float,
    maximize: bool,
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
) -> Numbers:
    step = made.reshape(()).double() + 1
    one = torch.ones_like(step)
    scale = one if grad_scale is None else grad_scale.reshape(()).double()
    return Numbers(
        step,
        one * (lr if lr_tensor is None else lr_tensor.reshape(())),
        (-one if maximize else one) / scale,
    )


def stepped_and_dtype(param: Tensor, masters: list[Tensor], i: int) -> tuple[Tensor, torch.dtype]:
    """What is stepped, a parameter or its master, and the type to compute in."""
    stepped = masters[i] if masters and masters[i].numel() else param
    return stepped, torch.promote_types(stepped.dtype, torch.float32)


def times_plus(tensor: Tensor, factor: Tensor, more: Tensor) -> Tensor:
    """``tensor * factor + more``, with the factor, near 1 and fp64, as the sum of two numbers that
    fp32 holds well.

    Rounded to fp32 as a whole it would be off by up to 3e-8, always to the same side, which a
    hundred steps add up to more than 1e-6. The first part has few bits and the second is not small:
    so their products' errors fall to both sides. Both are positive: infinity stays infinity.
    """
    high = ((factor * 256).ceil() - 2).clamp(min=0) / 256
    return tensor * high.to(tensor.dtype) + (tensor * (factor - high).to(tensor.dtype) + more)


def store(value: Tensor, tensor: Tensor, skip: Tensor | None) -> None:
    """Round the value to the tensor's type and put it there, unless it is to be skipped."""
    value = value.to(tensor.dtype).reshape(tensor.shape)
    tensor.copy_(value if skip is None else torch.where(skip, tensor, value))


def _check_lists(
    lists: dict[str, list[Tensor]],
    params: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
) -> None:
    if masters:
        lists = {**lists, "masters": masters}
    for name, tensors in (*lists.items(), *([("steps", steps)] if len(steps) != 1 else ())):
        if len(tensors) != len(params):
            raise RuntimeError(f"{name} has {len(tensors)} tensors, params has {len(params)}")
    if len(set(map(id, steps))) != len(steps):
        raise RuntimeError(
            "steps has a tensor twice, expected one for all parameters or one for each"
        )
    for name, tensors in lists.items():
        for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
            where = f"{name}[{i}]"
            if tensor.device != params[0].device:
                raise RuntimeError(f"{where} is not on {_shown(params[0].device)}")
            if not tensor.is_floating_point():
                raise RuntimeError(f"{where} has dtype {tensor.dtype}, expected floating point")
            if tensor.layout != torch.strided:
                raise RuntimeError(f"{where} is not dense: its layout is {tensor.layout}")
            if name == "masters" and tensor.numel() == 0:
                continue
            if tensor.numel() != param.numel():
                raise RuntimeError(
                    f"{where} has {tensor.numel()} elements, params[{i}] has {param.numel()}"
                )


def _check_number(name: str, tensor: Tensor, device: torch.device | None) -> None:
    if device is not None and tensor.device != device:
        raise RuntimeError(f"{name} is not on {_shown(device)}")
    if not tensor.is_floating_point():
        raise RuntimeError(f"{name} has dtype {tensor.dtype}, expected floating point")
    if tensor.numel() != 1:
        raise RuntimeError(f"{name} has {tensor.numel()} elements, expected one")


def _shown(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)
