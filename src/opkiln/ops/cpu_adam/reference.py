"""``cpu_adam`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

Tensors of 16-bit types are computed on in fp32 and rounded once, when stored; fp32 and fp64 are
computed on as they are. Unlike the native version these work on any device and any strides.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from opkiln.optimizing.references import (
    check_lists,
    check_step,
    forget,
    grad_factor,
    multiply_,
    no_ticket,
    not_kept,
    scaled,
    store,
    wide,
)

cpu_adam_keep = no_ticket
cpu_adam_kept_ = not_kept
cpu_adam_forget = forget


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
    receives its new value in its own dtype. Raises RuntimeError, before anything is written, if
    lists differ in length or tensors in size.
    """
    c = _coefficients(
        step, lr, beta1, beta2, weight_decay, adamw_mode, bias_correction, maximize, grad_scale
    )
    check_lists(
        {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}, copies
    )
    with torch.no_grad():
        for i, param in enumerate(params):
            p, m, v = (wide(t, like=param) for t in (param, exp_avgs[i], exp_avg_sqs[i]))
            g = _gradient(c, grads[i], p)
            m.lerp_(g, 1 - beta1)
            multiply_(v, beta2).addcmul_(g, g, value=1 - beta2)
            if c.kept != 1:
                multiply_(p, c.kept)
            p.sub_(_update(c, m, v, eps))
            store(p, param, copies[i] if copies else None)
            store(m, exp_avgs[i])
            store(v, exp_avg_sqs[i])


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
    check_lists(
        {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}, copies
    )
    with torch.no_grad():
        for i, param in enumerate(params):
            p, m, v = (wide(t, like=param) for t in (param, exp_avgs[i], exp_avg_sqs[i]))
            p.add_(_update(c, m, v, eps)).div_(c.kept)
            g = _gradient(c, grads[i], p)
            m.sub_(g, alpha=1 - beta1).div_(beta1)
            # Rounding may leave less than nothing of a small average.
            v.addcmul_(g, g, value=beta2 - 1).div_(beta2).clamp_(min=0)
            store(p, param, copies[i] if copies else None)
            store(m, exp_avgs[i])
            store(v, exp_avg_sqs[i])


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
    check_step(step)
    return _Coefficients(
        grad_factor=grad_factor(grad_scale, maximize),
        l2=0.0 if adamw_mode else weight_decay,
        kept=1 - lr * weight_decay if adamw_mode else 1.0,
        step_size=lr / (1 - beta1**step if bias_correction else 1),
        root_factor=1 / math.sqrt(1 - beta2**step if bias_correction else 1),
    )


def _gradient(c: _Coefficients, grad: Tensor, param: Tensor) -> Tensor:
    """The gradient that the averages see. With L2 it depends on the parameter before the step."""
    g = scaled(grad, param, c.grad_factor)
    return g.add_(param, alpha=c.l2) if c.l2 else g


def _update(c: _Coefficients, exp_avg: Tensor, exp_avg_sq: Tensor, eps: float) -> Tensor:
    """What a step takes off the parameter, from the averages after the step."""
    return (exp_avg * c.step_size).div_(exp_avg_sq.sqrt().mul_(c.root_factor).add_(eps))
