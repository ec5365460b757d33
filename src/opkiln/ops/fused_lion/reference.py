"""``fused_lion`` in pure PyTorch: what serves where there is no native version, and what tests see.

See multi_tensor/reference.py for what it takes beyond the native versions.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from opkiln.ops.multi_tensor.plans import refuse_plan
from opkiln.ops.multi_tensor.reference import prepared, stepped_and_dtype, store, times_plus


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

    The lists and the numbers in tensors are as with ``fused_adam_``, and so is what is raised.
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
            blend = m + (g - m) * (1 - beta1)
            sign = torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of NaN is 0
            change = -rate.to(dtype) * sign
            p = times_plus(p, 1 - rate * weight_decay, change) if weight_decay else p + change
            m = m + (g - m) * (1 - beta2)
            store(p, stepped, work.skip)
            if stepped is not param:
                store(p, param, work.skip)
            store(m, exp_avgs[i], work.skip)
        for count in steps:
            store(count + 1, count, work.skip)


def fused_lion_plan(*_: Any) -> NoReturn:
    """Raises RuntimeError: only the native op has plans."""
    refuse_plan("fused_lion")


def fused_lion_planned_(*_: Any, **__: Any) -> NoReturn:
    """Raises RuntimeError: only the native op has plans."""
    refuse_plan("fused_lion")
