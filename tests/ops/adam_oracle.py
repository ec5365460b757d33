"""Inputs for cpu_adam, and what it should make of them: the textbook's formulas in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
SIZES = (0, 1, 7, 15, 16, 17, 4095, 100003)

HYPER: dict[str, Any] = {
    "step": 3,
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "adamw_mode": True,
    "bias_correction": True,
    "maximize": False,
    "grad_scale": 1.0,
}


def oracle(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, h: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The textbook's formulas in float64."""
    p, g, m, v = (t.double() for t in (p, g, m, v))
    g = g / h["grad_scale"]
    if h["maximize"]:
        g = -g
    if h["adamw_mode"]:
        p = p - h["lr"] * h["weight_decay"] * p
    else:
        g = g + h["weight_decay"] * p
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    m_hat, v_hat = m, v
    if h["bias_correction"]:
        m_hat = m / (1 - h["beta1"] ** h["step"])
        v_hat = v / (1 - h["beta2"] ** h["step"])
    return p - h["lr"] * m_hat / (v_hat.sqrt() + h["eps"]), m, v


def lists(
    sizes: tuple[int, ...], param: torch.dtype = F32, grad: torch.dtype = F32,
    state: torch.dtype = F32, seed: int = 0,
) -> list[list[Tensor]]:  # fmt: skip
    """Params, grads, exp_avgs, exp_avg_sqs as they might be after a few steps."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    return [
        [normal(n).to(param) for n in sizes],
        [normal(n).to(grad) for n in sizes],
        [(normal(n) * 0.1).to(state) for n in sizes],
        [(normal(n) * 0.1).square().add(1e-3).to(state) for n in sizes],
    ]


def clone(tensors: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[t.clone() for t in row] for row in tensors]


def assert_stored(got: Tensor, exact: Tensor) -> None:
    """Equal to a float64 value up to one rounding to the stored type and a little fp32 error."""
    unit = torch.finfo(got.dtype).eps / 2
    slack = max(unit * 1.01, 1e-6) if got.dtype != F32 else 1e-6
    # A value near zero is a difference of larger ones, so fp32 leaves an absolute error as well.
    torch.testing.assert_close(got.double(), exact, rtol=slack, atol=4e-7, equal_nan=True)


def assert_step(adam: Any, tensors: list[list[Tensor]], **changes: Any) -> None:
    hyper = {**HYPER, **changes}
    before = clone(tensors)
    adam.cpu_adam_(*tensors, [], **hyper)
    for i in range(len(tensors[0])):
        exact = oracle(*(row[i] for row in before), hyper)
        for row, value in zip((0, 2, 3), exact, strict=True):
            assert_stored(tensors[row][i], value)
        assert torch.equal(tensors[1][i], before[1][i]), "the gradient was written to"
