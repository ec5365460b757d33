"""``fused_lion`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

See optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.optimizing.references import Numbers, prepared, times_plus


def fused_lion_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make a step in place, and add 1 to the counts in ``steps``.

    The lists, the numbers in tensors and the errors are those of ``fused_adam_``.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    work = prepared(lists, masters, steps, lr, maximize, lr_tensor, grad_scale, found_inf)

    def step(_: int, n: Numbers, p: Tensor, g: Tensor, m: Tensor) -> list[Tensor]:
        one = torch.ones_like(n.lr)
        blend = times_plus(m, one * beta1, (1 - beta1) * g)
        sign = torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of NaN is 0
        change = -n.lr.to(p.dtype) * sign
        p = times_plus(p, 1 - n.lr * weight_decay, change) if weight_decay else p + change
        return [p, times_plus(m, one * beta2, (1 - beta2) * g)]

    work.each(step)
    work.count_up()
