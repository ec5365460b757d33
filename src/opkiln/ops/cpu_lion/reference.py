"""``cpu_lion`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

Tensors of 16-bit types are computed on in fp32 and rounded once, when stored; fp32 and fp64 are
computed on as they are. Unlike the native version these work on any device and any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.optimizing.references import grad_factor, multiply_, update_each


def cpu_lion_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    copies: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: float,
) -> None:
    """Make a step, in place: by ``lr``, against the sign of a mean of the average and the gradient.

    Gradients are divided by ``grad_scale``. ``copies`` is empty, or has a tensor per parameter that
    receives its new value in its own dtype. Raises RuntimeError, before anything is written, if
    lists differ in length or tensors in size.
    """

    def step(p: Tensor, g: Tensor, m: Tensor) -> None:
        change = _direction(m.lerp(g, 1 - beta1)).mul_(-lr)
        if weight_decay:
            multiply_(p, 1 - lr * weight_decay, plus=change)
        else:
            p.add_(change)
        m.lerp_(g, 1 - beta2)

    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    update_each(step, grad_factor(grad_scale, maximize), lists, copies)


def cpu_lion_rollback_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    copies: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    grad_scale: float,
) -> None:
    """Undo a step, given what it was given, in place.

    What comes back differs from what was there by rounding only. With ``u`` the unit roundoff of
    the stored type (2**-24 for fp32, 2**-9 for bf16, 2**-11 for fp16), the errors stay within
    ``4u`` times ``|p| + lr`` for a parameter and ``(|m| + |g|) / beta2`` for the average, both as
    they were after the step. There is one exception: where the mean of average and gradient was so
    near to zero that the average's error decides its sign, the parameter is off by up to ``2 lr``.
    Raises RuntimeError as the step does, and for hyperparameters with which a step cannot be
    undone: a ``beta2`` of 0, or a decay that multiplies parameters by 0.
    """
    factor = grad_factor(grad_scale, maximize)
    kept = 1 - lr * weight_decay
    if beta2 == 0 or kept == 0:
        raise RuntimeError(
            f"a step with beta2 {beta2:g} and lr * weight_decay {lr * weight_decay:g} "
            "cannot be rolled back"
        )

    def undo(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.sub_(g, alpha=1 - beta2).div_(beta2)
        p.add_(_direction(m.lerp(g, 1 - beta1)), alpha=lr).div_(kept)

    update_each(undo, factor, {"params": params, "grads": grads, "exp_avgs": exp_avgs}, copies)


def _direction(mean: Tensor) -> Tensor:
    """-1, 0 or 1; NaN stays NaN, where torch's sign says 0 and would hide it."""
    return torch.where(mean.isnan(), mean, mean.sign())
