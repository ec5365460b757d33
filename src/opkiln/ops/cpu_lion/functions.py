"""The functions of the library; their bodies are the reference.

See ops/optimizing/references.py for what it takes beyond the native version.
"""

from __future__ import annotations

from torch import Tensor

from opkiln.ops.cpu_lion.op import kit
from opkiln.ops.optimizing.op_calls import Status
from opkiln.ops.optimizing.references import (
    OpArguments,
    gradient_factor,
    multiply_,
    nothing_kept,
    sign_of,
    update_each,
)


@kit.op(mutates=("params", "exp_avgs", "copies"))
def cpu_lion_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], copies: list[Tensor],
    lr: float, beta1: float, beta2: float, weight_decay: float, maximize: bool, grad_scale: float,
) -> None:  # fmt: skip
    """Make a step, in place: by ``lr``, against the sign of a mean of the average and the gradient.

    Gradients are divided by ``grad_scale``. ``copies`` is empty, or has a tensor per parameter that
    receives its new value in its own dtype. Raises RuntimeError, before anything is written, if
    lists differ in length or tensors in size.
    """
    given = OpArguments(locals())

    def step(p: Tensor, g: Tensor, m: Tensor) -> None:
        change = sign_of(m.lerp(g, 1 - given.beta1)).mul_(-given.lr)
        if given.weight_decay:
            multiply_(p, 1 - given.lr * given.weight_decay, plus=change)
        else:
            p.add_(change)
        m.lerp_(g, 1 - given.beta2)

    update_each(step, gradient_factor(given), given)


@kit.op(mutates=("params", "exp_avgs", "copies"))
def cpu_lion_rollback_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], copies: list[Tensor],
    lr: float, beta1: float, beta2: float, weight_decay: float, maximize: bool, grad_scale: float,
) -> None:  # fmt: skip
    """Undo a step, given what it was given, in place.

    What comes back differs from what was there by rounding only. With ``u`` the unit roundoff of
    the stored type (2**-24 for fp32, 2**-9 for bf16, 2**-11 for fp16), the errors stay within
    ``4u`` times ``|p| + lr`` for a parameter and ``(|m| + |g|) / beta2`` for the average, both as
    they were after the step. There is one exception: where the mean of average and gradient was so
    near to zero that the average's error decides its sign, the parameter is off by up to ``2 lr``.
    Raises RuntimeError as the step does, and for hyperparameters with which a step cannot be
    undone: a ``beta2`` of 0, or a decay that multiplies parameters by 0.
    """
    given = OpArguments(locals())
    factor = gradient_factor(given)
    beta2, decay = given.beta2, given.lr * given.weight_decay
    if beta2 == 0 or decay == 1:
        raise RuntimeError(
            f"a step with beta2 {beta2:g} and lr * weight_decay {decay:g} cannot be rolled back"
        )

    def undo(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.sub_(g, alpha=1 - beta2).div_(beta2)
        p.add_(sign_of(m.lerp(g, 1 - given.beta1)), alpha=given.lr).div_(1 - decay)

    update_each(undo, factor, given)


@kit.op(gradient=False)
def cpu_lion_keep(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], copies: list[Tensor]
) -> Tensor:
    """Keep all lists except the gradients until ``cpu_lion_forget``; a ticket for them. It has no
    elements if nothing is kept, as here."""
    return nothing_kept(params)


@kit.op(gradient=False)
def cpu_lion_kept_(
    ticket: Tensor, grads: list[Tensor], lr: float, beta1: float, beta2: float, weight_decay: float,
    maximize: bool, grad_scale: float,
) -> int:  # fmt: skip
    """Make a step with lists that are kept; a ``Status``. The callers count up the versions."""
    return int(Status.NOT_KEPT)


@kit.op(gradient=False)
def cpu_lion_forget(ticket: Tensor) -> None:
    """Let go of lists that are kept."""
