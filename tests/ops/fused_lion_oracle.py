"""Inputs for fused_lion, and the check of a step against the textbook's formulas in float64."""

from __future__ import annotations

from typing import Any

import torch
from adam_oracle import F32, assert_stored, clone
from fused_oracle import tensors as adam_tensors
from torch import Tensor

HYPER: dict[str, Any] = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "maximize": False
}  # fmt: skip
ROLES = ("params", "grads", "exp_avgs", "masters", "steps")


def tensors(
    sizes: tuple[int, ...], param: torch.dtype = F32, grad: torch.dtype = F32,
    masters: bool = False, steps: tuple[float, ...] = (2.0,), seed: int = 0,
) -> list[list[Tensor]]:  # fmt: skip
    """The op's lists, in their order."""
    params, grads, exp_avgs, _, wide, counts = adam_tensors(
        sizes, param, grad, masters, steps, seed
    )
    return [params, grads, exp_avgs, wide, counts]


def oracle(
    p: Tensor, g: Tensor, m: Tensor, h: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The parameter, the average, and the blend whose sign was taken, in float64."""
    p, g, m = (t.double() for t in (p, g, m))
    g = g / h.get("grad_scale", 1.0) * (-1 if h["maximize"] else 1)
    blend = h["beta1"] * m + (1 - h["beta1"]) * g
    sign = torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of NaN is 0
    p = p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * sign
    return p, h["beta2"] * m + (1 - h["beta2"]) * g, blend


def assert_step(
    op: Any, given: list[list[Tensor]], tensor_options: dict[str, Tensor] | None = None,
    **changes: Any,
) -> None:  # fmt: skip
    """Make a step; see that it did what float64 does, to these tensors and no others."""
    options = tensor_options or {}
    hyper = {**HYPER, **changes}
    before = clone(given)
    op.fused_lion_(*given, **hyper, **options)
    params, grads, exp_avgs, masters, steps = given
    exact = {
        **hyper,
        "lr": float(options.get("lr_tensor", hyper["lr"])),
        "grad_scale": float(options.get("grad_scale", 1.0)),
    }
    for i in range(len(params)):
        stepped = before[3][i] if masters and masters[i].numel() else before[0][i]
        p, m, blend = oracle(stepped, before[1][i], before[2][i], exact)
        sure = (blend.abs() > 1e-6) | (blend == 0)  # the sign of what is rounded to 0 is not
        assert_stored(params[i][sure], p[sure])
        assert_stored(exp_avgs[i], m)
        if masters and masters[i].numel():
            assert_stored(masters[i][sure], p[sure])
            assert torch.equal(params[i], masters[i].to(params[i].dtype)), "not the master, rounded"
        assert torch.equal(grads[i], before[1][i]), "the gradient was written to"
    for step, made in zip(steps, before[4], strict=True):
        assert step == made + 1
