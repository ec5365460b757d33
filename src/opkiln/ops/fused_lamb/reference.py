"""``fused_lamb`` in pure PyTorch: what serves where there is no native version, and what tests see.

See multi_tensor/reference.py for what it takes beyond the native versions.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from opkiln.ops.multi_tensor.plans import refuse_plan
from opkiln.ops.multi_tensor.reference import prepared, stepped_and_dtype, store, times_plus


def fused_lamb_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    coefficients: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    eps_inside_sqrt: bool,
    bias_correction: bool,
    maximize: bool,
    min_coeff: float,
    max_coeff: float,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make a step in place, the one after the number in ``steps``, and count it there.

    A parameter moves by ``lr`` times its coefficient times Adam's step with the decay added,
    ``u = m / (sqrt(v) + eps) + weight_decay * p``, the averages corrected for their start at 0. The
    coefficient is ``|p| / |u|`` over the whole tensor, brought into ``[min_coeff, max_coeff]``, and
    1 where one of the norms is 0; ``coefficients`` receives it, one per parameter.
    The lists and the numbers in tensors are as with ``fused_adam_``, and so is what is raised.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    work = prepared(lists, masters, steps, lr, maximize, lr_tensor, grad_scale, found_inf)
    if coefficients.dtype != torch.float32 or coefficients.shape != (len(params),):
        raise RuntimeError(
            f"coefficients has shape {list(coefficients.shape)} and dtype {coefficients.dtype}, "
            f"expected [{len(params)}] and torch.float32"
        )
    with torch.no_grad():
        for i, param in enumerate(params):
            stepped, dtype = stepped_and_dtype(param, masters, i)
            step, rate, grad_factor = work.of(i)
            p, g, m, v = (
                tensor.to(dtype).reshape(param.shape)
                for tensor in (stepped, grads[i], exp_avgs[i], exp_avg_sqs[i])
            )
            g = g * grad_factor.to(dtype)
            m = m + (g - m) * (1 - beta1)
            one = torch.ones_like(step)
            v = times_plus(v, one * beta2, (1 - beta2) * g * g)
            m_factor = 1 / (1 - beta1**step if bias_correction else one)
            v_factor = 1 / (1 - beta2**step if bias_correction else one)
            if eps_inside_sqrt:
                root = (v * v_factor.to(dtype) + eps).sqrt()
            else:
                root = v.sqrt() * v_factor.sqrt().to(dtype) + eps
            update = m * m_factor.to(dtype) / root + weight_decay * p
            size, change = (torch.linalg.vector_norm(each.double()) for each in (p, update))
            bounded = (size / change).clamp(min_coeff, max_coeff)
            ratio = torch.where((size == 0) | (change == 0), one, bounded)
            p = p - (rate * ratio).to(dtype) * update
            store(p, stepped, work.skip)
            if stepped is not param:
                store(p, param, work.skip)
            store(m, exp_avgs[i], work.skip)
            store(v, exp_avg_sqs[i], work.skip)
            store(ratio, coefficients[i], work.skip)
        for count in steps:
            store(count + 1, count, work.skip)


def fused_lamb_plan(*_: Any) -> NoReturn:
    """Raises RuntimeError: only the native op has plans."""
    refuse_plan("fused_lamb")


def fused_lamb_planned_(*_: Any, **__: Any) -> NoReturn:
    """Raises RuntimeError: only the native op has plans."""
    refuse_plan("fused_lamb")
