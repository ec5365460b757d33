"""Shared by the references of the optimizers' ops: checks of the lists, types, exact factors.

Tensors of 16-bit types are computed on in fp32 and rounded once, when stored; fp32 and fp64 are
computed on as they are. Unlike the native versions, references take any device, any strides and
states of any floating-point type. Those of the fused ops never wait for a GPU, so they can be
captured in a graph as well.

References keep no lists and make no plans. Their functions for that return that they did not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.ops.checks import dtype_name
from opkiln.ops.optimizing.op_calls import Status

# Lists


def check_lists(lists: Mapping[str, list[Tensor]], device: torch.device | None = None) -> None:
    """Raises RuntimeError for a list or tensor that does not match the first list's.

    ``lists`` is by the op's argument names, the parameters first. Masters and copies may be empty
    lists, and a master may have no elements. With a device, all tensors must be there, and may be
    laid out in any way.
    """
    optional = ("masters", "copies")
    lists = {name: each for name, each in lists.items() if each or name not in optional}
    (first, params), *_ = lists.items()
    for name, tensors in lists.items():
        check_length(name, tensors, first, params)
    for name, tensors in lists.items():
        for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
            check_tensor(f"{name}[{i}]", tensor, device)
            if tensor.numel() != param.numel() and (name != "masters" or tensor.numel()):
                raise RuntimeError(
                    f"{name}[{i}] has {tensor.numel()} elements, {first}[{i}] has {param.numel()}"
                )
            if device is None and tensor.shape != param.shape and not tensor.is_contiguous():
                raise RuntimeError(
                    f"{name}[{i}] and {first}[{i}] are laid out differently: shapes "
                    f"{tuple(tensor.shape)} and {tuple(param.shape)}, gaps in the first"
                )


def check_length(name: str, tensors: list[Tensor], first: str, params: list[Tensor]) -> None:
    """Raises RuntimeError for lists of different lengths."""
    if len(tensors) != len(params):
        raise RuntimeError(f"{name} has {len(tensors)} tensors, {first} has {len(params)}")


def check_tensor(where: str, tensor: Tensor, device: torch.device | None = None) -> None:
    """Raises RuntimeError for a tensor that is not dense, not of a floating type, or freed; and
    for one that is not on the device, if one is given."""
    if device is not None and tensor.device != device:
        shown = "the CPU" if device.type == "cpu" else str(device)
        raise RuntimeError(f"{where} is not on {shown}")
    if not tensor.is_floating_point():
        raise RuntimeError(f"{where} has dtype {dtype_name(tensor.dtype)}, expected floating point")
    if tensor.layout != torch.strided:
        raise RuntimeError(f"{where} is not dense: its layout is {tensor.layout}")
    # torch itself would end the process. (A subclass may have its memory elsewhere.)
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if is_plain and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"{where} has shape {[*tensor.shape]} and no memory: its storage was freed"
        )


# The functions of an op


class OpArguments(SimpleNamespace):
    """The arguments of a call, by their names; those of lists also in ``lists``."""

    lists: dict[str, list[Tensor]]

    def __init__(self, given: dict[str, Any]) -> None:
        lists = {name: each for name, each in given.items() if isinstance(each, list)}
        super().__init__(**given, lists=lists)


def nothing_kept(params: list[Tensor]) -> Tensor:
    """A ticket or a plan without elements: there is none."""
    # Made from a parameter, so that it is a fake tensor if the parameter is one.
    return params[0].new_empty(0, dtype=torch.int64) if params else torch.empty(0).long()


# Ops on host memory


def gradient_factor(given: OpArguments) -> float:
    """The factor for gradients. Raises RuntimeError for a scale of 0 or a step before the first."""
    if vars(given).get("step", 1) < 1:
        raise RuntimeError(f"step is {given.step}, expected at least 1")
    if given.grad_scale == 0:
        raise RuntimeError("grad_scale is 0, expected a divisor")
    return (-1 if given.maximize else 1) / float(given.grad_scale)


def scale_gradient(grad: Tensor, like: Tensor, factor: float | Tensor) -> Tensor:
    """The gradient times the factor, a new tensor of the type and shape of ``like``."""
    return grad.to(like.dtype).reshape(like.shape) * factor


def update_each(update: Callable[..., None], factor: float, given: OpArguments) -> None:
    """``update(parameter, gradient, *states)`` for each parameter, in the type to compute in.

    ``update`` writes to the parameter and the states, which are then rounded and stored, and may
    use the gradient up. Gradients are multiplied by the factor. Raises RuntimeError before anything
    is written, if lists differ in length or tensors in size.
    """
    check_lists(given.lists)
    *lists, copies = given.lists.values()
    with torch.no_grad():
        for i, (param, grad, *states) in enumerate(zip(*lists, strict=True)):
            dtype = torch.promote_types(param.dtype, torch.float32)
            stored = [param, *states]
            p, *values = wide = [tensor.to(dtype).view(param.shape) for tensor in stored]
            update(p, scale_gradient(grad, p, factor), *values)
            for value, tensor in zip(wide, stored, strict=True):
                if value.dtype != tensor.dtype:  # otherwise the tensor itself was written to
                    tensor.copy_(value.view(tensor.shape))
            if copies:
                copies[i].copy_(param.view(copies[i].shape))


def multiply_(tensor: Tensor, factor: float, plus: Tensor | None = None) -> Tensor:
    """Multiply in place by a factor near 1, as the sum of two numbers that fp32 represents well.

    ``plus`` is added before the last rounding. A small constant, added to numbers that are already
    rounded, would always be rounded to the same side.

    If the factor were rounded to fp32 as a whole, it would be off by up to 3e-8, always to the same
    side. That is more than 1e-6 after a hundred steps. The first part has few bits and the second
    is not small, so the errors of their products fall to both sides. Both are positive, so infinity
    stays infinity.
    """
    high = max(math.ceil(factor * 256) - 2, 0) / 256
    low = tensor * (factor - high)
    if plus is not None:
        low.add_(plus)
    return tensor.mul_(high).add_(low)


def sign_of(tensor: Tensor) -> Tensor:
    """-1, 0 or 1; NaN stays NaN, where torch's sign says 0 and would hide it."""
    return torch.where(tensor.isnan(), tensor, tensor.sign())


# Fused ops


class Numbers(NamedTuple):
    """The numbers of a step for one count of steps, as fp64 tensors of no dimension."""

    step: Tensor  # the number of the step to make; the first is 1
    lr: Tensor
    grad_factor: Tensor  # 1 / grad_scale, negative to maximize

    def total_weight(self, beta: float, bias_correction: bool) -> Tensor:
        """The weights of all gradients in an average that started at 0: ``1 - beta**step``. 1
        without the correction."""
        return 1 - beta**self.step if bias_correction else torch.ones_like(self.step)


class FusedStep:
    """A step of a fused op.

    Raises RuntimeError if lists differ in length, tensors in size or device, or a tensor of one
    number has more.
    """

    def __init__(self, given: OpArguments) -> None:
        params, steps = given.params, given.steps
        device = params[0].device if params else None
        if len(steps) != 1:
            check_length("steps", steps, "params", params)
        if len(set(map(id, steps))) != len(steps):
            raise RuntimeError(
                "steps has a tensor twice, expected one for all parameters or one for each"
            )
        lists = {name: tensors for name, tensors in given.lists.items() if name != "steps"}
        check_lists(lists, device)
        # Each half of a step of fused_lamb takes some of these only.
        lr, maximize, lr_tensor, grad_scale, found_inf = map(
            vars(given).get, ("lr", "maximize", "lr_tensor", "grad_scale", "found_inf")
        )
        for name, number in (
            ("lr_tensor", lr_tensor), ("grad_scale", grad_scale), ("found_inf", found_inf),
            *((f"steps[{i}]", step) for i, step in enumerate(steps)),
        ):  # fmt: skip
            if number is not None:
                check_tensor(name, number, device)
                if number.numel() != 1:
                    raise RuntimeError(f"{name} has {number.numel()} elements, expected one")
        *self._lists, self._masters = lists.values()
        self._steps = steps
        self._numbers = []  # one, or one per parameter
        with torch.no_grad():
            for made in steps:
                step = made.reshape(()).double() + 1
                one = torch.ones_like(step)
                rate = one * ((lr or 0.0) if lr_tensor is None else lr_tensor.reshape(()))
                scale = one if grad_scale is None else grad_scale.reshape(()).double()
                self._numbers.append(Numbers(step, rate, (-one if maximize else one) / scale))
            # If this is true, nothing is written.
            self._skip = None if found_inf is None else found_inf.reshape(()) != 0

    def update_params(self, update: Callable[..., Sequence[Tensor | None]]) -> None:
        """Store what ``update(i, numbers, parameter, gradient, *states)`` returns for each
        parameter: its new value and those of the states. None leaves a tensor as it is.

        ``update`` gets the tensors in the type to compute in, and the gradient times its factor. A
        master is stepped in its parameter's place, and both receive the new value.
        """
        params, grads, *states = self._lists
        with torch.no_grad():
            for i, param in enumerate(params):
                stepped = self._masters[i] if self._masters and self._masters[i].numel() else param
                dtype = torch.promote_types(stepped.dtype, torch.float32)
                numbers = self._numbers[i % len(self._numbers)]
                stored = [stepped, *(row[i] for row in states)]
                p, *values = (tensor.to(dtype).reshape(param.shape) for tensor in stored)
                made = update(
                    i,
                    numbers,
                    p,
                    scale_gradient(grads[i], p, numbers.grad_factor.to(dtype)),
                    *values,
                )
                if stepped is not param:
                    made, stored = [made[0], *made], [param, *stored]
                for value, tensor in zip(made, stored, strict=False):
                    if value is not None:
                        self.store(value, tensor)

    def store(self, value: Tensor, tensor: Tensor) -> None:
        """Write the value to the tensor, rounded to its type, unless the step is skipped."""
        value = value.to(tensor.dtype).reshape(tensor.shape)
        tensor.copy_(value if self._skip is None else torch.where(self._skip, tensor, value))

    def count_up(self) -> None:
        """Add 1 to each count of steps, unless the step is skipped."""
        with torch.no_grad():
            for step in self._steps:
                self.store(step + 1, step)


def times_plus(tensor: Tensor, factor: float | Tensor, more: Tensor) -> Tensor:
    """``tensor * factor + more``, with the factor in two parts as in ``multiply_``. Here it may be
    an fp64 tensor, because only the device may know it."""
    factor = torch.as_tensor(factor, dtype=torch.float64)
    high = ((factor * 256).ceil() - 2).clamp(min=0) / 256
    return tensor * high.to(tensor.dtype) + (tensor * (factor - high).to(tensor.dtype) + more)


# As in plan.h: the sizes, in words of 8 bytes, of a count's coefficients and of an item's record,
# each with its address.
_STEP_WORDS, _ITEM_WORDS = 9, 8
_CHUNK = 512


def fake_plan(params: list[Tensor], *others: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The fake of an op's ``keep``: a plan as large as that of these lists, and a ticket."""
    steps = others[-1]
    chunks = sum(-(-param.numel() // _CHUNK) for param in params)
    words = len(steps) * _STEP_WORDS + len(params) * _ITEM_WORDS + (chunks + 1) // 2
    return steps[0].new_empty(words, dtype=torch.int64), torch.empty(1, dtype=torch.int64)


def fake_step(*_: object) -> int:
    """The fake of an op's step with a plan. Its reference makes no plan, so it cannot stand in."""
    return int(Status.MADE)
