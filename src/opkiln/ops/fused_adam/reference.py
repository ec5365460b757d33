"""``fused_adam`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

See optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.optimizing.references import Numbers, prepared, times_plus


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
    and the parameter receives its new value, rounded. ``lr_tensor`` replaces ``lr``. Gradients are
    divided by ``grad_scale``. If ``found_inf`` is not 0, nothing is changed.
    Raises RuntimeError, before anything is written, if lists differ in length, tensors in size or
    device, or a tensor of one number has more.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    work = prepared(lists, masters, steps, lr, maximize, lr_tensor, grad_scale, found_inf)

    def step(_: int, n: Numbers, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
        if not adamw_mode:
            g = g + p * weight_decay
        one = torch.ones_like(n.step)
        m = times_plus(m, one * beta1, (1 - beta1) * g)
        v = times_plus(v, one * beta2, (1 - beta2) * g * g)
        step_size = n.lr / (1 - beta1**n.step if bias_correction else one)
        root_factor = (1 - beta2**n.step if bias_correction else one).rsqrt()
        change = -step_size.to(p.dtype) * m / (v.sqrt() * root_factor.to(p.dtype) + eps)
        decays = adamw_mode and weight_decay
        p = times_plus(p, 1 - n.lr * weight_decay, change) if decays else p + change
        return [p, m, v]

    work.each(step)
    work.count_up()
