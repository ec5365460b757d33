"""``cpu_adam`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

Tensors of 16-bit types are computed on in fp32 and rounded once, when stored; fp32 and fp64 are
computed on as they are. Unlike the native version these work on any device and any strides.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from opkiln.optimizing.references import check_step, grad_factor, multiply_, update_each

if TYPE_CHECKING:
    from torch import Tensor


def cpu_adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    *numbers: Any,
    **named: Any,
) -> None:
    """Make the ``step``-th step (the first is 1), in place.

    Gradients are divided by ``grad_scale``. ``copies`` is empty, or has a tensor per parameter that
    receives its new value in its own dtype. ``numbers`` are the arguments of ``_coefficients``.
    Raises RuntimeError, before anything is written, if lists differ in length or tensors in size.
    """
    c = _coefficients(*numbers, **named)
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    update_each(partial(_step, c), c.grad_factor, lists, copies)


def cpu_adam_rollback_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
    *numbers: Any,
    **named: Any,
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
    c = _coefficients(*numbers, **named)
    if c.beta1 == 0 or c.beta2 == 0 or c.kept == 0:
        raise RuntimeError(
            f"a step with beta1 {c.beta1:g}, beta2 {c.beta2:g} and lr * weight_decay "
            f"{c.decay:g} cannot be rolled back"
        )
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    update_each(partial(_rollback, c), c.grad_factor, lists, copies)


class _Coefficients(NamedTuple):
    grad_factor: float  # 1 / grad_scale, negative to maximize
    beta1: float
    beta2: float
    eps: float
    l2: float  # added to the gradient, times the parameter
    decay: float  # lr * weight_decay
    kept: float  # of the parameter, by decoupled decay: 1 - decay
    step_size: float
    root_factor: float


def _coefficients(
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
) -> _Coefficients:
    check_step(step)
    return _Coefficients(
        grad_factor=grad_factor(grad_scale, maximize),
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        l2=0.0 if adamw_mode else weight_decay,
        decay=lr * weight_decay,
        kept=1 - lr * weight_decay if adamw_mode else 1.0,
        step_size=lr / (1 - beta1**step if bias_correction else 1),
        root_factor=1 / math.sqrt(1 - beta2**step if bias_correction else 1),
    )


def _step(c: _Coefficients, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    if c.l2:
        g.add_(p, alpha=c.l2)
    m.lerp_(g, 1 - c.beta1)
    multiply_(v, c.beta2).addcmul_(g, g, value=1 - c.beta2)
    if c.kept != 1:
        multiply_(p, c.kept)
    p.sub_(_change(c, m, v))


def _rollback(c: _Coefficients, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    p.add_(_change(c, m, v)).div_(c.kept)
    if c.l2:  # of the parameter before the step
        g.add_(p, alpha=c.l2)
    m.sub_(g, alpha=1 - c.beta1).div_(c.beta1)
    # Rounding may leave less than nothing of a small average.
    v.addcmul_(g, g, value=c.beta2 - 1).div_(c.beta2).clamp_(min=0)


def _change(c: _Coefficients, m: Tensor, v: Tensor) -> Tensor:
    """What a step takes off the parameter, from the averages after the step."""
    return (m * c.step_size).div_(v.sqrt().mul_(c.root_factor).add_(c.eps))
