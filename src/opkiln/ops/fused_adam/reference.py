"""``fused_adam`` in pure PyTorch: what serves where there is no native version, and what tests see.

Tensors of 16-bit types are computed on in fp32 and rounded once, when stored; fp32 and fp64 are
computed on as they are. Unlike the native versions this takes any device, any strides and states
of any floating-point type. It never waits for a GPU, so it can be captured in a graph as well.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def fused_adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    maximize: bool,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make a step in place, the one after the number in ``steps``, and count it there.

    ``steps`` holds one tensor for all parameters or one for each, no two the same. ``masters`` is
    empty or has a tensor per parameter: one that is not empty is stepped in the parameter's place,
    and the parameter receives its new value, rounded. ``lr_tensor`` stands in for ``lr``. Gradients
    are divided by ``grad_scale``. Where ``found_inf`` is not 0, nothing is changed.
    Raises RuntimeError before anything is written when lists differ in length, tensors in size or
    device, or a tensor of one number has more.
    """
    _check_lists(params, grads, exp_avgs, exp_avg_sqs, masters, steps)
    device = params[0].device if params else None
    for name, number in (
        ("lr_tensor", lr_tensor), ("grad_scale", grad_scale), ("found_inf", found_inf),
        *((f"steps[{i}]", step) for i, step in enumerate(steps)),
    ):  # fmt: skip
        if number is not None:
            _check_number(name, number, device)
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    with torch.no_grad():
        numbers = [
            _coefficients(
                step.reshape(()), lr if lr_tensor is None else lr_tensor.reshape(()), grad_scale,
                beta1, beta2, weight_decay, adamw_mode, bias_correction, maximize,
            )
            for step in steps
        ]  # fmt: skip
        for i, param in enumerate(params):
            stepped = masters[i] if masters and masters[i].numel() else param
            dtype = torch.promote_types(stepped.dtype, torch.float32)
            c = _Coefficients(*(number.to(dtype) for number in numbers[i % len(numbers)]))
            p, g, m, v = (
                tensor.to(dtype).reshape(param.shape)
                for tensor in (stepped, grads[i], exp_avgs[i], exp_avg_sqs[i])
            )
            g = g * c.grad_factor
            if not adamw_mode:
                g = g + p * weight_decay
            m = m + (g - m) * (1 - beta1)
            v = _times(v, c.beta2_high, c.beta2_low) + (1 - beta2) * g * g
            if adamw_mode and weight_decay:
                p = _times(p, c.kept_high, c.kept_low)
            p = p - c.step_size * m / (v.sqrt() * c.root_factor + eps)
            _store(p, stepped, skip)
            if stepped is not param:
                _store(p, param, skip)
            _store(m, exp_avgs[i], skip)
            _store(v, exp_avg_sqs[i], skip)
        for step in steps:
            _store(step + 1, step, skip)


class _Coefficients(NamedTuple):
    """Tensors of no dimension: what they depend on may be known to the device alone."""

    grad_factor: Tensor  # 1 / grad_scale, negative to maximize
    kept_high: Tensor  # of the parameter, by decoupled decay: 1 - lr * weight_decay
    kept_low: Tensor
    beta2_high: Tensor
    beta2_low: Tensor
    step_size: Tensor
    root_factor: Tensor


def _coefficients(
    steps_made: Tensor,
    lr: float | Tensor,
    grad_scale: Tensor | None,
    beta1: float,
    beta2: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    maximize: bool,
) -> _Coefficients:
    step = steps_made.double() + 1
    one = torch.ones_like(step)
    rate = one * lr
    scale = one if grad_scale is None else grad_scale.reshape(()).double()
    return _Coefficients(
        (-one if maximize else one) / scale,
        *_parts(1 - rate * weight_decay if adamw_mode else one),
        *_parts(one * beta2),
        rate / (1 - beta1**step if bias_correction else one),
        (1 - beta2**step if bias_correction else one).rsqrt(),
    )


def _parts(factor: Tensor) -> tuple[Tensor, Tensor]:
    """A factor near 1 as the sum of two numbers that fp32 holds well.

    Rounded to fp32 as a whole it would be off by up to 3e-8, always to the same side, which a
    hundred steps add up to more than 1e-6. The first part has few bits and the second is not small:
    so their products' errors fall to both sides. Both are positive: infinity stays infinity.
    """
    high = ((factor * 256).ceil() - 2).clamp(min=0) / 256
    return high, factor - high


def _times(tensor: Tensor, high: Tensor, low: Tensor) -> Tensor:
    return tensor * high + tensor * low


def _store(value: Tensor, tensor: Tensor, skip: Tensor | None) -> None:
    value = value.to(tensor.dtype).reshape(tensor.shape)
    tensor.copy_(value if skip is None else torch.where(skip, tensor, value))


def _check_lists(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
) -> None:
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if masters:
        lists["masters"] = masters
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
