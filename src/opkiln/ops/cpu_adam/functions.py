"""The functions of the library; their bodies are the reference.

See ops/optimizing/references.py for what it takes beyond the native version.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from opkiln.ops.cpu_adam.op import kit
from opkiln.ops.optimizing.op_calls import Status
from opkiln.ops.optimizing.references import (
    OpArguments,
    gradient_factor,
    multiply_,
    nothing_kept,
    update_each,
)


@kit.op(mutates=("params", "exp_avgs", "exp_avg_sqs", "copies"))
def cpu_adam_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    copies: list[Tensor], step: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, adamw_mode: bool, bias_correction: bool, maximize: bool, grad_scale: float,
) -> None:  # fmt: skip
    """Make the ``step``-th step (the first is 1), in place.

    Gradients are divided by ``grad_scale``. ``copies`` is empty, or has a tensor per parameter that
    receives its new value in its own dtype. Raises RuntimeError, before anything is written, if
    lists differ in length or tensors in size.
    """
    given = OpArguments(locals())
    factor = gradient_factor(given)
    update_each(partial(_step, _Coefficients(given)), factor, given)


@kit.op(mutates=("params", "exp_avgs", "exp_avg_sqs", "copies"))
def cpu_adam_rollback_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    copies: list[Tensor], step: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, adamw_mode: bool, bias_correction: bool, maximize: bool, grad_scale: float,
) -> None:  # fmt: skip
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
    given = OpArguments(locals())
    factor, c = gradient_factor(given), _Coefficients(given)
    if c.beta1 == 0 or c.beta2 == 0 or c.kept == 0:
        raise RuntimeError(
            f"a step with beta1 {c.beta1:g}, beta2 {c.beta2:g} and lr * weight_decay "
            f"{given.lr * given.weight_decay:g} cannot be rolled back"
        )
    update_each(partial(_rollback, c), factor, given)


@kit.op(gradient=False)
def cpu_adam_keep(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    copies: list[Tensor],
) -> Tensor:  # fmt: skip
    """Keep all lists except the gradients until ``cpu_adam_forget``; a ticket for them. It has no
    elements if nothing is kept, as here."""
    return nothing_kept(params)


@kit.op(gradient=False)
def cpu_adam_kept_(
    ticket: Tensor, grads: list[Tensor], step: int, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, adamw_mode: bool, bias_correction: bool, maximize: bool,
    grad_scale: float,
) -> int:  # fmt: skip
    """Make a step with lists that are kept; a ``Status``. The callers count up the versions."""
    return int(Status.NOT_KEPT)


@kit.op(gradient=False)
def cpu_adam_forget(ticket: Tensor) -> None:
    """Let go of lists that are kept."""


class _Coefficients:
    def __init__(self, h: OpArguments) -> None:
        self.beta1, self.beta2, self.eps = h.beta1, h.beta2, h.eps
        # L2 decay is added to the gradient, times the parameter; decoupled decay leaves `kept` of
        # the parameter.
        self.l2 = 0.0 if h.adamw_mode else h.weight_decay
        self.kept = 1 - h.lr * h.weight_decay if h.adamw_mode else 1.0
        self.step_size: float = h.lr / (1 - h.beta1**h.step if h.bias_correction else 1)
        self.root_factor = 1 / math.sqrt(1 - h.beta2**h.step if h.bias_correction else 1)

    def change(self, m: Tensor, v: Tensor) -> Tensor:
        """What a step takes off the parameter, from the averages after the step."""
        return (m * self.step_size).div_(v.sqrt().mul_(self.root_factor).add_(self.eps))


def _step(c: _Coefficients, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    if c.l2:
        g.add_(p, alpha=c.l2)
    m.lerp_(g, 1 - c.beta1)
    multiply_(v, c.beta2).addcmul_(g, g, value=1 - c.beta2)
    if c.kept != 1:
        multiply_(p, c.kept)
    p.sub_(c.change(m, v))


def _rollback(c: _Coefficients, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    p.add_(c.change(m, v)).div_(c.kept)
    if c.l2:  # of the parameter before the step
        g.add_(p, alpha=c.l2)
    m.sub_(g, alpha=1 - c.beta1).div_(c.beta1)
    # Rounding may leave less than nothing of a small average.
    v.addcmul_(g, g, value=c.beta2 - 1).div_(c.beta2).clamp_(min=0)
