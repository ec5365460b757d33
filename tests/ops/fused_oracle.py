"""Inputs for fused_adam, and the check of a step against the textbook's formulas in float64."""

from __future__ import annotations

from typing import Any

import torch
from adam_oracle import F32, assert_stored, clone, lists, oracle
from torch import Tensor

HYPER: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "adamw_mode": True,
    "bias_correction": True,
    "maximize": False,
}
ROLES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "steps")


def tensors(
    sizes: tuple[int, ...], param: torch.dtype = F32, grad: torch.dtype = F32,
    masters: bool = False, steps: tuple[float, ...] = (2.0,), seed: int = 0,
) -> list[list[Tensor]]:  # fmt: skip
    """The op's lists, in their order. A master is what its parameter was rounded from."""
    params, *others = lists(sizes, F32, grad, F32, seed)
    counts = [torch.tensor(step) for step in steps]
    return [[p.to(param) for p in params], *others, params if masters else [], counts]


def assert_step(
    op: Any, given: list[list[Tensor]], tensor_options: dict[str, Tensor] | None = None,
    **changes: Any,
) -> None:  # fmt: skip
    """Make a step; see that it did what float64 does, to these tensors and no others."""
    options = tensor_options or {}
    hyper = {**HYPER, **changes}
    before = clone(given)
    op.fused_adam_(*given, **hyper, **options)
    params, grads, exp_avgs, exp_avg_sqs, masters, steps = given
    exact_hyper = {
        **hyper,
        "lr": float(options.get("lr_tensor", hyper["lr"])),
        "grad_scale": float(options.get("grad_scale", 1.0)),
    }
    for i in range(len(params)):
        made = before[5][i % len(steps)]
        stepped = before[4][i] if masters and masters[i].numel() else before[0][i]
        rest = (row[i] for row in before[1:4])
        p, m, v = oracle(stepped, *rest, {**exact_hyper, "step": int(made) + 1})
        assert_stored(params[i], p)
        assert_stored(exp_avgs[i], m)
        assert_stored(exp_avg_sqs[i], v)
        if masters and masters[i].numel():
            assert_stored(masters[i], p)
            assert torch.equal(params[i], masters[i].to(params[i].dtype)), "not the master, rounded"
        assert torch.equal(grads[i], before[1][i]), "the gradient was written to"
    for step, made in zip(steps, before[5], strict=True):
        assert step == made + 1
