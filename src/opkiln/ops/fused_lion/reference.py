"""``fused_lion`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

See optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.optimizing.references import no_plan, not_kept, prepared, stepped_and_dtype, times_plus

fused_lion_plan = no_plan
fused_lion_planned_ = not_kept


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
    with torch.no_grad():
        for i, param in enumerate(params):
            stepped, dtype = stepped_and_dtype(param, masters, i)
            _, rate, grad_factor = work.of(i)
            p, g, m = (
                tensor.to(dtype).reshape(param.shape) for tensor in (stepped, grads[i], exp_avgs[i])
            )
            g = g * grad_factor.to(dtype)
            one = torch.ones_like(rate)
            blend = times_plus(m, one * beta1, (1 - beta1) * g)
            sign = torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of NaN is 0
            change = -rate.to(dtype) * sign
            p = times_plus(p, 1 - rate * weight_decay, change) if weight_decay else p + change
            m = times_plus(m, one * beta2, (1 - beta2) * g)
            work.store_stepped(p, stepped, param)
            work.store(m, exp_avgs[i])
        work.count_up(steps)
