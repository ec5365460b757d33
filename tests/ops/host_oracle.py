"""Inputs for cpu_lion and cpu_adagrad, and what they should make of them: formulas in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from adam_oracle import F32, assert_stored, clone
from torch import Tensor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Case(NamedTuple):
    """An op: its function and argument names, usual numbers, and the textbook's formulas."""

    op: str
    function: str  # that undoes it has `rollback_` appended
    arguments: tuple[str, ...]  # the lists: parameters, gradients, the state
    hyper: dict[str, Any]
    oracle: Callable[[Tensor, Tensor, Tensor, dict[str, Any]], tuple[Tensor, Tensor]]
    # How far from exact a rollback may be, in units of the stored type's roundoff times 4: for the
    # parameter and for the state, given what there was before and after the step.
    scales: Callable[[list[Tensor], list[Tensor], dict[str, Any]], tuple[Tensor, Tensor]]


def _gradient(g: Tensor, h: dict[str, Any]) -> Tensor:
    g = g.double() / h["grad_scale"]
    return -g if h["maximize"] else g


def _lion(p: Tensor, g: Tensor, m: Tensor, h: dict[str, Any]) -> tuple[Tensor, Tensor]:
    p, g, m = p.double(), _gradient(g, h), m.double()
    mean = h["beta1"] * m + (1 - h["beta1"]) * g
    direction = torch.where(mean.isnan(), mean, mean.sign())
    p = p * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * direction
    return p, h["beta2"] * m + (1 - h["beta2"]) * g


def _lion_scales(
    before: list[Tensor], after: list[Tensor], h: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    p, g, m = after[0].double(), _gradient(after[1], h), after[2].double()
    return p.abs() + h["lr"], (m.abs() + g.abs()) / h["beta2"]


def _adagrad(p: Tensor, g: Tensor, s: Tensor, h: dict[str, Any]) -> tuple[Tensor, Tensor]:
    p, g, s = p.double(), _gradient(g, h), s.double()
    g = g + h["weight_decay"] * p
    s = s + g * g
    rate = h["lr"] / (1 + (h["step"] - 1) * h["lr_decay"])
    return p - rate * g / (s.sqrt() + h["eps"]), s


def _adagrad_scales(
    before: list[Tensor], after: list[Tensor], h: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    p, g, s = after[0].double(), _gradient(after[1], h), after[2].double()
    g = g.abs() + h["weight_decay"] * before[0].double().abs()
    moved = (p - before[0].double()).abs()
    left = (1 - h["lr"] * h["weight_decay"] / (s.sqrt() + h["eps"])).abs()
    slack = 2 if h["weight_decay"] else 1  # the parameter's error, carried into the sum
    return (p.abs() + moved) / left, slack * (s + g * g)


LION = Case(
    "cpu_lion",
    "cpu_lion_",
    ("params", "grads", "exp_avgs"),
    {
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "maximize": False,
        "grad_scale": 1.0,
    },
    _lion,
    _lion_scales,
)
ADAGRAD = Case(
    "cpu_adagrad",
    "cpu_adagrad_",
    ("params", "grads", "sums"),
    {
        "step": 3,
        "lr": 1e-2,
        "lr_decay": 0.1,
        "eps": 1e-10,
        "weight_decay": 0.1,
        "maximize": False,
        "grad_scale": 1.0,
    },
    _adagrad,
    _adagrad_scales,
)
CASES = {case.op: case for case in (LION, ADAGRAD)}


def lists(
    case: Case, sizes: tuple[int, ...], param: torch.dtype = F32, grad: torch.dtype = F32,
    state: torch.dtype = F32, seed: int = 0,
) -> list[list[Tensor]]:  # fmt: skip
    """Params, grads and states as they might be after a few steps.

    For Lion no average cancels its gradient so nearly that rounding would decide the sign.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    params = [normal(n).to(param) for n in sizes]
    grads = [normal(n).to(grad) for n in sizes]
    states = [(normal(n) * 0.1).to(state) for n in sizes]
    if case is ADAGRAD:
        states = [s.square().add(1e-2) for s in states]
    else:
        for g, m in zip(grads, states, strict=True):
            near = (0.9 * m.double() + 0.1 * g.double()).abs() < 1e-5
            m[near] = 1.0
    return [params, grads, states]


def assert_step(case: Case, ops: Any, tensors: list[list[Tensor]], **changes: Any) -> None:
    hyper = {**case.hyper, **changes}
    before = clone(tensors)
    getattr(ops, case.function)(*tensors, [], **hyper)
    for i in range(len(tensors[0])):
        exact = case.oracle(*(row[i] for row in before), hyper)
        for row, value in zip((0, 2), exact, strict=True):
            assert_stored(tensors[row][i], value)
        assert torch.equal(tensors[1][i], before[1][i]), "the gradient was written to"


def assert_rolled_back(case: Case, ops: Any, tensors: list[list[Tensor]], **changes: Any) -> None:
    """The bound that the reference's docstring states."""
    hyper = {**case.hyper, **changes}
    before = clone(tensors)
    getattr(ops, case.function)(*tensors, [], **hyper)
    after = clone(tensors)
    getattr(ops, f"{case.function}rollback_")(*tensors, [], **hyper)
    for i in range(len(tensors[0])):
        scales = case.scales([row[i] for row in before], [row[i] for row in after], hyper)
        for row, scale in zip((0, 2), scales, strict=True):
            kind = torch.finfo(tensors[row][i].dtype)
            error = (tensors[row][i].double() - before[row][i].double()).abs()
            assert (error <= 2 * kind.eps * scale + kind.smallest_normal).all()
