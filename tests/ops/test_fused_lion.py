"""The op fused_lion: its arithmetic in every mode, type and layout of work, and what it refuses.

It runs three times: the reference, the native CPU version, and the CUDA kernels themselves, in the
emulator.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adam_oracle import BF16, DTYPES, F16, F32, clone
from fused_fixtures import fixtures, native
from fused_lion_oracle import HYPER, ROLES, assert_step, oracle, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import MASTERS, with_gradients
from sample.references import references

reference = references("fused_lion")


kernel_fixture, op_fixture = fixtures("fused_lion")
SIZES = (0, 1, 3, 4, 7, 511, 512, 513, 4095, 4097)


@pytest.mark.parametrize(("param", "masters", "grad"), with_gradients(MASTERS))
def test_every_mix_of_types_and_sizes_agrees_with_float64(
    op: Any, param: torch.dtype, masters: bool, grad: torch.dtype
) -> None:
    assert_step(op, tensors(SIZES, param, grad, masters))


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0}, {"beta1": 0.0}, {"beta2": 0.0}])
def test_every_mode_agrees_with_float64(op: Any, maximize: bool, changes: dict[str, float]) -> None:
    assert_step(op, tensors((33, 1000)), maximize=maximize, **changes)


def test_fp32_stays_within_1e_6_of_float64_after_100_steps(op: Any) -> None:
    params, _, exp_avgs, _, steps = tensors((3000,), steps=(0.0,))
    exp_avgs[0].zero_()
    exact = (params[0].double(), exp_avgs[0].double())
    generator = torch.Generator().manual_seed(1)
    sure = torch.ones(3000, dtype=torch.bool)
    for _ in range(100):
        grad = torch.randn(3000, generator=generator)
        op.fused_lion_(params, [grad], exp_avgs, [], steps, **{**HYPER, "lr": 1e-3})
        *exact, blend = oracle(exact[0], grad, exact[1], {**HYPER, "lr": 1e-3})
        sure &= blend.abs() > 1e-6
    assert steps[0] == 100
    assert sure.float().mean() > 0.99
    for got, value in zip((params, exp_avgs), exact, strict=True):
        assert (got[0].double() - value)[sure].norm() <= 1e-6 * value.norm()


def test_parameters_may_be_at_steps_of_their_own_and_lists_of_any_length(op: Any) -> None:
    sizes = tuple(1 + i % 37 for i in range(150))
    assert_step(op, tensors(sizes, steps=tuple(float(i % 5) for i in range(150))))


@pytest.mark.parametrize("shifted", range(5), ids=("params", "grads", "exp_avgs", "masters", "all"))
def test_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not(
    op: Any, shifted: int
) -> None:
    before = tensors((3000,), BF16, F16, masters=True)
    for offset, size in ((1, 17), (3, 2000), (4, 2000)):
        whole = clone(before)
        starts = [offset if shifted in (row, 4) else 8 for row in range(4)]
        parts = [
            [tensor[start : start + size] for tensor in row]
            for row, start in zip(whole, starts, strict=False)
        ]
        assert_step(op, [*parts, whole[4]])
        for row, old, start in zip(whole, before, starts, strict=False):
            assert torch.equal(row[0][:start], old[0][:start])
            assert torch.equal(row[0][start + size :], old[0][start + size :])


def test_numbers_in_tensors_stand_in(op: Any) -> None:
    lists = tensors((33, 1000))
    lists[1] = [grad * 8 for grad in lists[1]]
    options = {"lr_tensor": torch.tensor(3e-3), "grad_scale": torch.tensor([8.0])}
    assert_step(op, lists, options, lr=math.nan)


def test_nothing_changes_where_a_gradient_is_not_finite(op: Any) -> None:
    lists = tensors((33, 1000), BF16, BF16, masters=True, steps=(2.0, 3.0))
    lists[1][1][7] = math.inf
    before = clone(lists)
    op.fused_lion_(*lists, **HYPER, found_inf=torch.tensor([1.0]))
    for row, old in zip(lists, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, old, strict=True))


def test_nan_and_infinity_travel_as_the_formulas_say(op: Any) -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    param, grad = odd.repeat_interleave(5), odd.repeat(5)
    exact = oracle(param, grad, torch.zeros(25), HYPER)
    steps = [torch.tensor(0.0)]
    average = torch.zeros(25)
    op.fused_lion_([param], [grad], [average], [], steps, **HYPER)
    torch.testing.assert_close(param.double(), exact[0], equal_nan=True)
    torch.testing.assert_close(average.double(), exact[1], equal_nan=True)


@pytest.mark.parametrize("role", [1, 2, 3])
def test_a_tensor_of_another_size_is_refused_by_name(role: int) -> None:
    for op in (native("fused_lion"), reference):
        lists = tensors((6, 6), BF16, masters=True, steps=(1.0, 1.0))
        lists[role][1] = torch.zeros(5)
        before = clone(lists)
        with pytest.raises(RuntimeError, match=rf"{ROLES[role]}\[1\] has 5 elements, params\[1\]"):
            op.fused_lion_(*lists, **HYPER)
        for row, old in zip(lists, before, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, old, strict=True))


def test_opcheck_finds_nothing() -> None:
    op = native("fused_lion")
    torch.library.opcheck(op.fused_lion_, tuple(tensors((5, 33), BF16, masters=True)), HYPER)


def test_versions_are_counted_up() -> None:
    lists = tensors((8,), BF16, masters=True)
    versions = [row[0]._version for row in lists]
    native("fused_lion").fused_lion_(*lists, **HYPER)
    assert [row[0]._version - old for row, old in zip(lists, versions, strict=True)] == [
        1, 0, 1, 1, 1
    ]  # fmt: skip


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the op has no state
)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=5),
    param=st.sampled_from(DTYPES),
    grad=st.sampled_from(DTYPES),
    masters=st.booleans(),
    lr=st.floats(1e-6, 0.1),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.9999),
    weight_decay=st.floats(0, 1),
    maximize=st.booleans(),
    grad_scale=st.floats(0.125, 1024),
    seed=st.integers(0, 99),
)
def test_whatever_the_tensors_and_numbers_a_step_agrees_with_float64(
    op: Any, sizes: list[int], param: torch.dtype, grad: torch.dtype, masters: bool,
    grad_scale: float, seed: int, **numbers: Any,
) -> None:  # fmt: skip
    given_tensors = tensors(tuple(sizes), param, grad, masters and param != F32, seed=seed)
    assert_step(op, given_tensors, {"grad_scale": torch.tensor(grad_scale)}, **numbers)
