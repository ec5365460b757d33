"""Inputs for fused_lamb, and the check of a step against the textbook's formulas in float64."""

from __future__ import annotations

from typing import Any

import torch
from adam_oracle import F32, clone
from fused_oracle import tensors as adam_tensors
from torch import Tensor

HYPER: dict[str, Any] = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1,
    "eps_inside_sqrt": False, "bias_correction": True, "maximize": False, "min_coeff": 0.01,
    "max_coeff": 10.0,
}  # fmt: skip
ROLES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "steps")


def tensors(
    sizes: tuple[int, ...], param: torch.dtype = F32, grad: torch.dtype = F32,
    masters: bool = False, steps: tuple[float, ...] = (2.0,), seed: int = 0,
) -> list[list[Tensor]]:  # fmt: skip
    """The op's lists, in their order; the coefficients come after them."""
    return adam_tensors(sizes, param, grad, masters, steps, seed)


def coefficients(lists: list[list[Tensor]]) -> Tensor:
    """A place for them, with nothing of use there yet."""
    return torch.full((len(lists[0]),), 7.0, device=lists[5][0].device)


def oracle(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, h: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Parameter, averages and coefficient, in float64."""
    p, g, m, v = (t.double() for t in (p, g, m, v))
    g = g / h.get("grad_scale", 1.0) * (-1 if h["maximize"] else 1)
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    m_hat, v_hat = m, v
    if h["bias_correction"]:
        m_hat = m / (1 - h["beta1"] ** h["step"])
        v_hat = v / (1 - h["beta2"] ** h["step"])
    root = (v_hat + h["eps"]).sqrt() if h["eps_inside_sqrt"] else v_hat.sqrt() + h["eps"]
    u = m_hat / root + h["weight_decay"] * p
    size, change = float(p.norm()), float(u.norm())
    ratio = min(max(size / change, h["min_coeff"]), h["max_coeff"]) if size and change else 1.0
    return p - h["lr"] * ratio * u, m, v, ratio


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Up to one rounding to the stored type and a little fp32 error."""
    unit = torch.finfo(got.dtype).eps / 2
    slack = max(unit * 1.01, 2e-6)
    torch.testing.assert_close(got.double(), exact, rtol=slack, atol=1e-6, equal_nan=True)


def assert_step(
    op: Any, given: list[list[Tensor]], tensor_options: dict[str, Tensor] | None = None,
    **changes: Any,
) -> None:  # fmt: skip
    """Make a step; see that it did what float64 does, to these tensors and no others."""
    options = tensor_options or {}
    hyper = {**HYPER, **changes}
    before, ratios = clone(given), coefficients(given)
    op.fused_lamb_(*given, ratios, **hyper, **options)
    params, grads, exp_avgs, exp_avg_sqs, masters, steps = given
    exact = {
        **hyper,
        "lr": float(options.get("lr_tensor", hyper["lr"])),
        "grad_scale": float(options.get("grad_scale", 1.0)),
    }
    for i in range(len(params)):
        made = before[5][i % len(steps)]
        stepped = before[4][i] if masters and masters[i].numel() else before[0][i]
        rest = (row[i] for row in before[1:4])
        p, m, v, ratio = oracle(stepped, *rest, {**exact, "step": int(made) + 1})
        assert abs(float(ratios[i]) - ratio) <= 2e-6 * ratio, (float(ratios[i]), ratio)
        assert_near(params[i], p)
        assert_near(exp_avgs[i], m)
        assert_near(exp_avg_sqs[i], v)
        if masters and masters[i].numel():
            assert_near(masters[i], p)
            assert torch.equal(params[i], masters[i].to(params[i].dtype)), "not the master, rounded"
        assert torch.equal(grads[i], before[1][i]), "the gradient was written to"
    for step, made in zip(steps, before[5], strict=True):
        assert step == made + 1
