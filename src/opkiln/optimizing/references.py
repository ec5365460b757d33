"""What the references of the optimizers' ops share: checks of the lists, types, exact factors.

Tensors of 16-bit types are computed on in fp32 and rounded once, when stored; fp32 and fp64 are
computed on as they are. Unlike the native versions, references take any device, any strides and
states of any floating-point type. Those of the fused ops never wait for a GPU, so they can be
captured in a graph as well.

References keep no lists and make no plans. Their functions for that return a result that says so.
"""

from __future__ import annotations

import math
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from opkiln.optimizing.op_calls import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Lists


def check_lists(lists: Mapping[str, list[Tensor]], device: torch.device | None = None) -> None:
    """Raises RuntimeError for a list or tensor that does not match the first list's.

    ``lists`` is by the op's argument names, the parameters first. A master may have no elements:
    then there is none. With a device, all tensors must be there, and may be laid out in any way.
    """
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
        raise RuntimeError(f"{where} has dtype {tensor.dtype}, expected floating point")
    if tensor.layout != torch.strided:
        raise RuntimeError(f"{where} is not dense: its layout is {tensor.layout}")
    # torch itself would end the process. (A subclass may have its memory elsewhere.)
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if is_plain and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"{where} has shape {[*tensor.shape]} and no memory: its storage was freed"
        )


def no_ticket(params: list[Tensor], *_: list[Tensor]) -> Tensor:
    """An op's ``keep``: a ticket without elements says that nothing is kept."""
    # Made from a parameter, so that it is a fake tensor if the parameter is one.
    return params[0].new_empty(0, dtype=torch.int64) if params else torch.empty(0).long()


def no_plan(params: list[Tensor], *_: list[Tensor]) -> tuple[Tensor, Tensor]:
    """An op's ``plan``: a ledger without elements says that there is no plan."""
    return no_ticket(params), torch.empty(0, dtype=torch.int64)


def not_kept(*_: Any, **__: Any) -> int:
    """An op's ``kept_`` or ``planned_``: it makes no step, and says so."""
    return int(Status.NOT_KEPT)


_KEEPING: dict[str, Callable[..., Any]] = {
    "keep": no_ticket,
    "kept_": not_kept,
    "forget": lambda ticket: None,  # noqa: ARG005 (the schema names it)
    "plan": no_plan,
    "planned_": not_kept,
}


def reference_of(op: str) -> SimpleNamespace:
    """The functions of an op's reference.py, and those for kept lists and plans."""
    module = import_module(f"opkiln.ops.{op}.reference")
    keeping = {f"{op}_{name}": function for name, function in _KEEPING.items()}
    return SimpleNamespace(**vars(module), **keeping)


# Ops on host memory


def check_step(step: int) -> None:
    """Raises RuntimeError for a step before the first."""
    if step < 1:
        raise RuntimeError(f"step is {step}, expected at least 1")


def grad_factor(grad_scale: float, maximize: bool) -> float:
    """The factor for gradients. Raises RuntimeError for a scale of 0."""
    if grad_scale == 0:
        raise RuntimeError("grad_scale is 0, expected a divisor")
    return (-1 if maximize else 1) / grad_scale


def scaled(grad: Tensor, like: Tensor, factor: float) -> Tensor:
    """The gradient times the factor, a new tensor of the type and shape of ``like``."""
    return grad.to(like.dtype).reshape(like.shape) * factor


def update_each(
    update: Callable[..., None],
    factor: float,
    lists: Mapping[str, list[Tensor]],
    copies: list[Tensor],
) -> None:
    """``update(parameter, gradient, *states)`` for each parameter, in the type to compute in.

    ``update`` writes to the parameter and the states, which are then rounded and stored, and may
    use the gradient up. ``lists`` has parameters, gradients and states, as in ``check_lists``;
    gradients are multiplied by the factor. Raises RuntimeError before anything is written.
    """
    check_lists({**lists, "copies": copies} if copies else lists)
    with torch.no_grad():
        for i, (param, grad, *states) in enumerate(zip(*lists.values(), strict=True)):
            dtype = torch.promote_types(param.dtype, torch.float32)
            stored = [param, *states]
            p, *values = wide = [tensor.to(dtype).view(param.shape) for tensor in stored]
            update(p, scaled(grad, p, factor), *values)
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


# Fused ops


class Numbers(NamedTuple):
    """The numbers of a step for one count of steps, as fp64 tensors of no dimension."""

    step: Tensor  # the number of the step to make; the first is 1
    lr: Tensor
    grad_factor: Tensor  # 1 / grad_scale, negative to maximize


class Work(NamedTuple):
    """A step whose arguments have been checked."""

    lists: list[list[Tensor]]  # parameters, gradients, states
    masters: list[Tensor]
    steps: list[Tensor]
    numbers: list[Numbers]  # one, or one per parameter
    skip: Tensor | None  # if this is true, nothing is written

    def each(self, update: Callable[..., Sequence[Tensor | None]]) -> None:
        """Store what ``update(i, numbers, parameter, gradient, *states)`` returns for each
        parameter: its new value and those of the states. None leaves a tensor as it is.

        ``update`` gets the tensors in the type to compute in, and the gradient times its factor. A
        master is stepped in its parameter's place, and both receive the new value.
        """
        params, grads, *states = self.lists
        with torch.no_grad():
            for i, param in enumerate(params):
                stepped = self.masters[i] if self.masters and self.masters[i].numel() else param
                dtype = torch.promote_types(stepped.dtype, torch.float32)
                numbers = self.numbers[i % len(self.numbers)]
                stored = [stepped, *(row[i] for row in states)]
                g, p, *values = (t.to(dtype).reshape(param.shape) for t in (grads[i], *stored))
                made = update(i, numbers, p, g * numbers.grad_factor.to(dtype), *values)
                if stepped is not param:
                    made, stored = [made[0], *made], [param, *stored]
                for value, tensor in zip(made, stored, strict=False):
                    if value is not None:
                        self.store(value, tensor)

    def store(self, value: Tensor, tensor: Tensor) -> None:
        """Write the value to the tensor, rounded to its type, unless ``skip`` is true."""
        value = value.to(tensor.dtype).reshape(tensor.shape)
        tensor.copy_(value if self.skip is None else torch.where(self.skip, tensor, value))

    def count_up(self) -> None:
        """Add 1 to each count of steps, unless ``skip`` is true."""
        with torch.no_grad():
            for step in self.steps:
                self.store(step + 1, step)


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
    """Check all arguments. ``lists`` has parameters, gradients and states, by their schema names.

    Raises RuntimeError if lists differ in length, tensors in size or device, or a tensor of one
    number has more.
    """
    params = lists["params"]
    device = params[0].device if params else None
    if len(steps) != 1:
        check_length("steps", steps, "params", params)
    if len(set(map(id, steps))) != len(steps):
        raise RuntimeError(
            "steps has a tensor twice, expected one for all parameters or one for each"
        )
    check_lists({**lists, "masters": masters} if masters else lists, device)
    for name, number in (
        ("lr_tensor", lr_tensor), ("grad_scale", grad_scale), ("found_inf", found_inf),
        *((f"steps[{i}]", step) for i, step in enumerate(steps)),
    ):  # fmt: skip
        if number is not None:
            check_tensor(name, number, device)
            if number.numel() != 1:
                raise RuntimeError(f"{name} has {number.numel()} elements, expected one")
    numbers = []
    with torch.no_grad():
        for made in steps:
            step = made.reshape(()).double() + 1
            one = torch.ones_like(step)
            rate = one * (lr if lr_tensor is None else lr_tensor.reshape(()))
            scale = one if grad_scale is None else grad_scale.reshape(()).double()
            numbers.append(Numbers(step, rate, (-one if maximize else one) / scale))
        skip = None if found_inf is None else found_inf.reshape(()) != 0
    return Work([*lists.values()], masters, steps, numbers, skip)


def times_plus(tensor: Tensor, factor: Tensor, more: Tensor) -> Tensor:
    """``tensor * factor + more``, with the factor in two parts as in ``multiply_``. Here it is an
    fp64 tensor, because only the device may know it."""
    high = ((factor * 256).ceil() - 2).clamp(min=0) / 256
    return tensor * high.to(tensor.dtype) + (tensor * (factor - high).to(tensor.dtype) + more)


# As in plan.h: the sizes, in words of 8 bytes, of a count's coefficients and of an item's record,
# each with its address.
_STEP_WORDS, _ITEM_WORDS = 9, 8
_CHUNK = 512
_LEDGER_HEAD = 4


def fake_plan(params: list[Tensor], *others: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The fake of an op's ``plan``: a plan and its ledger, as large as those of these lists."""
    steps = others[-1]
    chunks = sum(-(-param.numel() // _CHUNK) for param in params)
    words = len(steps) * _STEP_WORDS + len(params) * _ITEM_WORDS + (chunks + 1) // 2
    return (
        steps[0].new_empty(words, dtype=torch.int64),
        torch.empty(_LEDGER_HEAD + 2 * len(params), dtype=torch.int64),
    )


def fakes(op: str) -> SimpleNamespace:
    """The fakes of the functions of a fused op that return something. (Its reference makes no plan,
    so it cannot stand in.)"""
    return SimpleNamespace(
        **{f"{op}_plan": fake_plan, f"{op}_planned_": lambda *_, **__: int(Status.MADE)}
    )
