"""``cpu_adam`` in pure PyTorch: what runs where there is no native version, and what tests compare.

Tensors of 16-bit types are computed on in fp32 and rounded once, when stored; fp32 and fp64 are
computed on as they are. Unlike the native version these work on any device and any strides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


def cpu_adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    maximize: bool,
    grad_scale: float,
) -> None:
    """Make the ``step``-th step (the first is 1), in place.

    Gradients are divided by ``grad_scale``. ``copies`` is empty, or has a tensor per parameter that
    receives its new value in its own dtype. Raises RuntimeError before anything is written when
    lists differ in length, or tensors in size.
    """
    c = _coefficients(
        step, lr, beta1, beta2, weight_decay, adamw_mode, bias_correction, maximize, grad_scale
    )
    _check(params, grads, exp_avgs, exp_avg_sqs, copies)
    with torch.no_grad():
        for i, param in enumerate(params):
            p, m, v = (_wide(t, like=param) for t in (param, exp_avgs[i], exp_avg_sqs[i]))
            g = _gradient(c, grads[i], p)
            m.lerp_(g, 1 - beta1)
            _multiply_(v, beta2).addcmul_(g, g, value=1 - beta2)
            if c.kept != 1:
                _multiply_(p, c.kept)
            p.sub_(_update(c, m, v, eps))
            _store(p, param, copies[i] if copies else None)
            _store(m, exp_avgs[i])
            _store(v, exp_avg_sqs[i])


def cpu_adam_rollback_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    maximize: bool,
    grad_scale: float,
) -> None:
    """Undo the ``step``-th step, given what it was given, in place.

    What comes back differs from what was there by rounding only. With ``u`` the unit roundoff of
    the stored type (2**-24 for fp32, 2**-9 for bf16, 2**-11 for fp16), the errors stay within
    ``4u`` times ``|p| + |update|`` for a parameter, ``(|m| + |g|) / beta1`` for the average and
    ``(v + g * g) / beta2`` for the average of squares, all as they were after the step, ``g`` with
    L2 decay included. L2 decay carries the parameter's error into the averages: there ``u`` is the
    parameter's where that is larger.
    Raises RuntimeError as the step does, and for hyperparameters with which a step cannot be
    undone: a beta of 0, or a decoupled decay that multiplies parameters by 0.
    """
    c = _coefficients(
        step, lr, beta1, beta2, weight_decay, adamw_mode, bias_correction, maximize, grad_scale
    )
    if beta1 == 0 or beta2 == 0 or c.kept == 0:
        raise RuntimeError(
            f"a step with beta1 {beta1:g}, beta2 {beta2:g} and lr * weight_decay "
            f"{lr * weight_decay:g} cannot be rolled back"
        )
    _check(params, grads, exp_avgs, exp_avg_sqs, copies)
    with torch.no_grad():
        for i, param in enumerate(params):
            p, m, v = (_wide(t, like=param) for t in (param, exp_avgs[i], exp_avg_sqs[i]))
            p.add_(_update(c, m, v, eps)).div_(c.kept)
            g = _gradient(c, grads[i], p)
            m.sub_(g, alpha=1 - beta1).div_(beta1)
            # Rounding may leave less than nothing of a small average.
            v.addcmul_(g, g, value=beta2 - 1).div_(beta2).clamp_(min=0)
            _store(p, param, copies[i] if copies else None)
            _store(m, exp_avgs[i])
            _store(v, exp_avg_sqs[i])


class _Coefficients(NamedTuple):
    grad_factor: float  # 1 / grad_scale, negative to maximize
    l2: float  # added to the gradient, times the parameter
    kept: float  # of the parameter, by decoupled decay: 1 - lr * weight_decay
    step_size: float
    root_factor: float


def _coefficients(
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    maximize: bool,
    grad_scale: float,
) -> _Coefficients:
    if step < 1:
        raise RuntimeError(f"step is {step}, expected at least 1")
    if grad_scale == 0:
        raise RuntimeError("grad_scale is 0, expected a divisor")
    return _Coefficients(
        grad_factor=(-1 if maximize else 1) / grad_scale,
        l2=0.0 if adamw_mode else weight_decay,
        kept=1 - lr * weight_decay if adamw_mode else 1.0,
        step_size=lr / (1 - beta1**step if bias_correction else 1),
        root_factor=1 / math.sqrt(1 - beta2**step if bias_correction else 1),
    )


def _multiply_(tensor: Tensor, factor: float) -> Tensor:
    """In place, by a factor near 1 as the sum of two numbers that fp32 holds well.

    Rounded to fp32 as a whole it would be off by up to 3e-8, always to the same side, which a
    hundred steps add up to more than 1e-6. The first part has few bits and the second is not small:
    so their products' errors fall to both sides. Both are positive: infinity stays infinity.
    """
    high = max(math.ceil(factor * 256) - 2, 0) / 256
    low = tensor * (factor - high)
    return tensor.mul_(high).add_(low)


def _gradient(c: _Coefficients, grad: Tensor, param: Tensor) -> Tensor:
    """The gradient that the averages see. With L2 it depends on the parameter before the step."""
    g = grad.to(param.dtype).reshape(param.shape) * c.grad_factor
    return g.add_(param, alpha=c.l2) if c.l2 else g


def _update(c: _Coefficients, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float) -> Tensor:
    """What a step takes off the parameter, from the averages after the step."""
    return (exp_avg * c.step_size).div_(exp_avg_sq.sqrt().mul_(c.root_factor).add_(eps))


def _wide(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor itself where its type is the one to compute in, otherwise a wider copy."""
    return tensor.to(torch.promote_types(like.dtype, torch.float32)).view(like.shape)


def _store(value: Tensor, tensor: Tensor, copy: Tensor | None = None) -> None:
    if value.dtype != tensor.dtype:
        tensor.copy_(value.view(tensor.shape))
    if copy is not None:
        copy.copy_(tensor.view(copy.shape))


def _check(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
) -> None:
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if copies:
        lists["copies"] = copies
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise RuntimeError(f"{name} has {len(tensors)} tensors, params has {len(params)}")
        for i, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
            if not tensor.is_floating_point():
                raise RuntimeError(f"{name}[{i}] has dtype {tensor.dtype}, expected floating point")
            if tensor.layout != torch.strided:
                raise RuntimeError(f"{name}[{i}] is not dense: its layout is {tensor.layout}")
            if tensor.numel() != param.numel():
                raise RuntimeError(
                    f"{name}[{i}] has {tensor.numel()} elements, params[{i}] has {param.numel()}"
                )
            if tensor.shape != param.shape and not tensor.is_contiguous():
                raise RuntimeError(
                    f"{name}[{i}] and params[{i}] are laid out differently: "
                    f"shapes {tuple(tensor.shape)} and {tuple(param.shape)}, gaps in the first"
                )
