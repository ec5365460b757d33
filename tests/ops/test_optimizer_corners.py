"""One step of every optimizer, native, emulated and reference, against float64 at the corners of
its numbers, from states that are far larger and far smaller than the gradient. An error is measured
by the terms that a result is the sum of: nothing that a formula keeps may be lost."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import adam_oracle
import fused_fixtures
import fused_lamb_oracle
import fused_lion_oracle
import fused_oracle
import pytest
import torch
from adam_oracle import F32
from host_oracle import ADAGRAD, LION
from sample.references import references
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = (0.0, 1e-15, 1e-6, 1.0, -1.0, -3e-7, 1e6)  # their squares are normal numbers in fp32
SQUARES = tuple(size * size for size in SIZES)
CORNERS = {
    "beta1": (0.0, 0.3, 0.9, 1 - 2**-20),
    "beta2": (0.0, 0.3, 0.999, 1 - 2**-20),
    "eps": (0.0, 1e-8, 1.0),
    "weight_decay": (0.0, 0.1, 10.0),
    "step": (1, 1000),
    "adamw_mode": (True, False),
}
OFF = 2e-6  # of the terms


class Kind(NamedTuple):
    """An optimizer's op: its usual numbers, the sizes of its states, and the textbook's formulas in
    float64, which give the parameter and the states after a step."""

    hyper: dict[str, Any]
    states: tuple[tuple[float, ...], ...]
    exact: Callable[..., tuple[Tensor, ...]]


KINDS = {
    "cpu_adam": Kind(adam_oracle.HYPER, (SIZES, SQUARES), adam_oracle.oracle),
    "cpu_lion": Kind(LION.hyper, (SIZES,), LION.oracle),
    "cpu_adagrad": Kind(ADAGRAD.hyper, (SQUARES,), ADAGRAD.oracle),
    "fused_adam": Kind(fused_oracle.HYPER, (SIZES, SQUARES), adam_oracle.oracle),
    "fused_lion": Kind(fused_lion_oracle.HYPER, (SIZES,), LION.oracle),
    "fused_lamb": Kind(fused_lamb_oracle.HYPER, (SIZES, SQUARES), adam_oracle.oracle),
}
VERSIONS = [(op, version) for op in KINDS for version in ("native", "reference", "emulated")
            if version != "emulated" or op.startswith("fused")]  # fmt: skip


def version_of(op: str, version: str) -> Any:
    if version == "reference":
        return references(op)
    return fused_fixtures.native(op) if version == "native" else fused_fixtures.emulated_op(op)


def corners(hyper: dict[str, Any], together: int) -> Iterator[dict[str, Any]]:
    """All corners of any so many numbers, the others as usual."""
    named = [name for name in CORNERS if name in hyper]
    for names in itertools.combinations(named, together):
        for values in itertools.product(*map(CORNERS.__getitem__, names)):
            yield {**hyper, **dict(zip(names, values, strict=True))}


def step(made: Any, op: str, hyper: dict[str, Any], given: list[Tensor]) -> list[Tensor]:
    """The parameter and the states after a step."""
    lists = [[each.clone()] for each in given]
    call(made, op, hyper, lists)
    return [each for (each,) in (lists[0], *lists[2:])]


def call(made: Any, op: str, hyper: dict[str, Any], lists: list[list[Tensor]]) -> None:
    more: list[Any] = [[]]
    if op.startswith("fused"):
        hyper = dict(hyper)
        more.append([torch.tensor(hyper.pop("step") - 1.0)])
    if op == "fused_lamb":
        more.append(torch.ones(1))
    getattr(made, f"{op}_")(*lists, *more, **hyper)


@pytest.mark.parametrize(("op", "version"), VERSIONS)
def test_every_corner_agrees_with_float64(op: str, version: str, whole_grid: bool) -> None:
    made, kind = version_of(op, version), KINDS[op]
    columns = zip(*itertools.product(SIZES, SIZES, *kind.states), strict=True)
    given = [torch.tensor(column, dtype=F32) for column in columns]
    p, g, *states = (each.abs() for each in given)
    usual = {"step": 3, **kind.hyper} if op.startswith("fused") else kind.hyper
    for hyper in corners(usual, 3 if whole_grid else 2):
        full = {"grad_scale": 1.0, "adamw_mode": True, **hyper, "maximize": False}
        exact, (moved, *sums) = kind.exact(*given, full), kind.exact(p, g, *states, full)
        terms = [p + (p - moved).abs(), *sums]
        for name, got, value, term in zip("pmv", step(made, op, hyper, given), exact, terms,
                                          strict=False):  # fmt: skip
            near = (got.double() - value).abs() <= OFF * term + 1e-37
            near |= (got == value) | (got.isnan() & value.isnan())
            if name == "p" and "lion" in op:  # rounding decides a sign where the two all but cancel
                blend = [hyper["beta1"] * m + (1 - hyper["beta1"]) * g
                         for g, m in (given[1:], (g, *states))]  # fmt: skip
                near |= blend[0].abs() <= 1e-5 * blend[1]
            if name == "p" and op == "fused_lamb":
                continue  # its step depends on all elements: test_fused_lamb.py
            wrong = (~near).nonzero().flatten().tolist()[:3]
            told = [([float(each[i]) for each in given], float(got[i]), float(value[i]))
                    for i in wrong]  # fmt: skip
            assert not wrong, (name, hyper, told)


@pytest.mark.parametrize(("op", "version"), VERSIONS)
def test_tensor_whose_storage_was_freed_is_refused(op: str, version: str) -> None:
    made, kind = version_of(op, version), KINDS[op]
    hyper = {"step": 3, **kind.hyper} if op.startswith("fused") else kind.hyper
    for place in range(2 + len(kind.states)):
        lists = [[torch.ones(100)] for _ in range(2 + len(kind.states))]
        lists[place][0].untyped_storage().resize_(0)
        with pytest.raises(
            RuntimeError, match=r"\[0\] has shape \[100\] and no memory: its storage"
        ):
            call(made, op, hyper, lists)
