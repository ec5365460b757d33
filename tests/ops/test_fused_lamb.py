"""The op fused_lamb: its arithmetic, its coefficients, and what it refuses.

It runs three times: the reference, the native CPU version, and the CUDA kernels themselves, in the
emulator.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adam_oracle import BF16, DTYPES, F16, F32, clone
from fused_fixtures import fixtures, launches, native
from fused_lamb_oracle import HYPER, ROLES, assert_step, coefficients, oracle, tensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mixes import MASTERS, with_gradients
from sample.references import references
from torch import Tensor

reference = references("fused_lamb")


kernel_fixture, op_fixture = fixtures("fused_lamb")
FIRST_HALF = {name: HYPER[name] for name in HYPER if name not in ("lr", "min_coeff", "max_coeff")}
SECOND_HALF = {name: HYPER[name] for name in HYPER if name != "maximize"}
SIZES = (0, 1, 3, 4, 7, 511, 512, 513, 4095, 4097)


@pytest.mark.parametrize(("param", "masters", "grad"), with_gradients(MASTERS))
def test_every_mix_of_types_and_sizes_agrees_with_float64(
    op: Any, param: torch.dtype, masters: bool, grad: torch.dtype
) -> None:
    assert_step(op, tensors(SIZES, param, grad, masters))


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"weight_decay": 0.0}, {"bias_correction": False}, {"eps_inside_sqrt": True},
        {"beta1": 0.0}, {"beta2": 0.0}, {"min_coeff": 0.0, "max_coeff": 1e9},
        {"min_coeff": 3.0, "max_coeff": 3.0},
    ],
    ids=str,
)  # fmt: skip
def test_every_mode_agrees_with_float64(op: Any, maximize: bool, changes: dict[str, Any]) -> None:
    assert_step(op, tensors((33, 1000)), maximize=maximize, **changes)
    assert_step(op, tensors((33,), steps=(0.0,)), maximize=maximize, **changes)


def test_fp32_stays_within_1e_6_of_float64_after_100_steps(op: Any) -> None:
    params, _, exp_avgs, exp_avg_sqs, _, steps = tensors((2000, 70), steps=(0.0,))
    for zeros in (*exp_avgs, *exp_avg_sqs):
        zeros.zero_()
    exact = [[t.double() for t in row] for row in (params, exp_avgs, exp_avg_sqs)]
    generator = torch.Generator().manual_seed(1)
    hyper = {**HYPER, "lr": 1e-3}
    for step in range(1, 101):
        grads = [torch.randn(p.shape, generator=generator) for p in params]
        op.fused_lamb_(params, grads, exp_avgs, exp_avg_sqs, [], steps, torch.ones(2), **hyper)
        for i, grad in enumerate(grads):
            p, m, v, _ = oracle(
                exact[0][i], grad, exact[1][i], exact[2][i], {**hyper, "step": step}
            )
            exact[0][i], exact[1][i], exact[2][i] = p, m, v
    assert steps[0] == 100
    for row, values in zip((params, exp_avgs, exp_avg_sqs), exact, strict=True):
        for got, value in zip(row, values, strict=True):
            assert (got.double() - value).norm() <= 1e-6 * value.norm()


def test_sums_of_a_tensor_among_others_are_its_own(op: Any) -> None:
    """Large enough that sums of chunks are folded, and not at the folds' borders."""
    assert_step(op, tensors((5, 270_003, 1, 0, 512, 3000)))


def test_a_tensor_of_zeros_moves_with_a_coefficient_of_1(op: Any) -> None:
    lists = tensors((9, 600))
    lists[0][0].zero_()
    lists[1][1].zero_()
    lists[2][1].zero_()
    out = coefficients(lists)
    before = clone(lists)
    op.fused_lamb_(*lists, out, **{**HYPER, "weight_decay": 0.0})
    assert out.tolist() == [1.0, 1.0]
    assert not torch.equal(lists[0][0], before[0][0])
    assert torch.equal(lists[0][1], before[0][1])


def test_nan_is_seen_in_the_coefficient(op: Any) -> None:
    lists = tensors((9, 600))
    lists[1][1][3] = math.nan
    out = coefficients(lists)
    op.fused_lamb_(*lists, out, **HYPER)
    assert not out[0].isnan()
    assert out[1].isnan()
    assert lists[0][1].isnan().all()
    assert not lists[0][0].isnan().any()


def test_parameters_may_be_at_steps_of_their_own_and_lists_of_any_length(op: Any) -> None:
    sizes = tuple(1 + i % 37 for i in range(150))
    assert_step(op, tensors(sizes, steps=tuple(float(i % 5) for i in range(150))))


@pytest.mark.parametrize("shifted", range(6), ids=("params", "grads", "m", "v", "masters", "all"))
def test_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not(
    op: Any, shifted: int
) -> None:
    before = tensors((3000,), BF16, F16, masters=True)
    for offset, size in ((1, 17), (3, 2000), (4, 2000)):
        whole = clone(before)
        starts = [offset if shifted in (row, 5) else 8 for row in range(5)]
        parts = [
            [tensor[start : start + size] for tensor in row]
            for row, start in zip(whole, starts, strict=False)
        ]
        assert_step(op, [*parts, whole[5]])
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
    before, out = clone(lists), coefficients(lists)
    op.fused_lamb_(*lists, out, **HYPER, found_inf=torch.tensor([1.0]))
    assert out.tolist() == [7.0, 7.0]
    for row, old in zip(lists, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, old, strict=True))


@pytest.mark.parametrize(
    ("param", "masters"), [(F32, False), (BF16, False), (BF16, True), (F16, True)]
)
def test_the_halves_of_a_step_are_the_step(op: Any, param: torch.dtype, masters: bool) -> None:
    """Also of tensors in parts, whose sums of squares are added up between the halves."""
    last = (
        263_000 if masters and param == F16 and op is not reference else 700
    )  # sums of the larger are folded
    whole = tensors((0, 5, 3001, last), param, BF16, masters, steps=(2.0, 3.0, 4.0, 5.0))
    parts = [
        [part.clone() for tensor in row for part in (tensor[:3], tensor[3:])] for row in whole[:5]
    ]
    parts.append([step.clone() for step in whole[5] for _ in range(2)])
    ratios, ratios_of_parts = coefficients(whole), coefficients(parts)
    op.fused_lamb_(*whole, ratios, **HYPER)

    squares = torch.full((8, 2), math.nan, dtype=torch.float64)
    made = [float(step) for step in parts[5]]
    before = clone(parts[:1])
    op.fused_lamb_average_(*parts, squares, **FIRST_HALF)
    assert [float(step) for step in parts[5]] == made, "the first half counts no step"
    assert all(torch.equal(a, b) for a, b in zip(parts[0], before[0], strict=True))
    sums = squares.view(4, 2, 2).sum(1, keepdim=True).expand(4, 2, 2).reshape(8, 2).contiguous()
    op.fused_lamb_move_(*parts, sums, ratios_of_parts, **SECOND_HALF)

    assert [float(step) for step in parts[5]] == [step + 1 for step in made]
    # Sums of chunks are fp32 in the kernels, and the parts' chunks are others than the whole's:
    # 512 terms, each with its rounding, in a tree.
    torch.testing.assert_close(ratios_of_parts.view(4, 2)[:, 0], ratios, rtol=1e-6, atol=0)
    assert torch.equal(*ratios_of_parts.view(4, 2).unbind(1))
    for row, expected in zip(parts[:5], whole[:5], strict=True):
        joined = [torch.cat(row[i : i + 2]) for i in range(0, len(row), 2)]
        for got, tensor in zip(joined, expected, strict=True):
            unit = torch.finfo(tensor.dtype).eps
            torch.testing.assert_close(got, tensor, rtol=unit, atol=1e-8)


def test_the_halves_change_nothing_where_a_gradient_is_not_finite(op: Any) -> None:
    lists = tensors((33, 1000), BF16, BF16, masters=True, steps=(2.0, 3.0))
    lists[1][1][7] = math.inf
    before, out = clone(lists), coefficients(lists)
    squares = torch.zeros(2, 2, dtype=torch.float64)
    found = {"found_inf": torch.tensor([1.0])}
    op.fused_lamb_average_(*lists, squares, **FIRST_HALF, **found)
    op.fused_lamb_move_(*lists, squares, out, **SECOND_HALF, **found)
    assert out.tolist() == [7.0, 7.0]
    for row, old in zip(lists, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, old, strict=True))


@pytest.mark.parametrize("wrong", [torch.zeros(3, 2, dtype=torch.float64), torch.zeros(2, 2)])
def test_a_place_for_squares_that_does_not_fit_is_refused(wrong: Tensor) -> None:
    for op in (native("fused_lamb"), reference):
        with pytest.raises(RuntimeError, match="squares has"):
            op.fused_lamb_average_(*tensors((6, 6)), wrong, **FIRST_HALF)


def test_a_list_of_any_length_takes_few_launches(kernel: Any) -> None:
    for sizes, expected in (((40,) * 30, 4), ((263_000, 40), 5), ((0, 0), 2)):
        lists = tensors(sizes)
        plan, ticket = kernel.fused_lamb_keep(*lists)
        before = launches("fused_lamb")
        kernel.fused_lamb_kept_(plan, ticket, lists[1], coefficients(lists), **HYPER)
        assert launches("fused_lamb") - before == expected


@pytest.mark.parametrize("role", [1, 2, 3, 4])
def test_a_tensor_of_another_size_is_refused_by_name(role: int) -> None:
    for op in (native("fused_lamb"), reference):
        lists = tensors((6, 6), BF16, masters=True, steps=(1.0, 1.0))
        lists[role][1] = torch.zeros(5)
        before = clone(lists)
        with pytest.raises(RuntimeError, match=rf"{ROLES[role]}\[1\] has 5 elements, params\[1\]"):
            op.fused_lamb_(*lists, coefficients(lists), **HYPER)
        for row, old in zip(lists, before, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, old, strict=True))


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)], ids=str)
def test_a_place_for_coefficients_that_does_not_fit_is_refused(wrong: Tensor) -> None:
    for op in (native("fused_lamb"), reference):
        with pytest.raises(RuntimeError, match="coefficients has"):
            op.fused_lamb_(*tensors((6, 6)), wrong, **HYPER)


def test_opcheck_finds_nothing() -> None:
    op = native("fused_lamb")
    lists = tensors((5, 33), BF16, masters=True)
    torch.library.opcheck(op.fused_lamb_, (*lists, coefficients(lists)), HYPER)
    squares = torch.ones(2, 2, dtype=torch.float64)
    torch.library.opcheck(op.fused_lamb_average_, (*lists, squares), FIRST_HALF)
    torch.library.opcheck(op.fused_lamb_move_, (*lists, squares, coefficients(lists)), SECOND_HALF)


def test_versions_are_counted_up() -> None:
    lists = tensors((8,), BF16, masters=True)
    out = coefficients(lists)
    versions = [row[0]._version for row in lists]
    native("fused_lamb").fused_lamb_(*lists, out, **HYPER)
    assert [row[0]._version - old for row, old in zip(lists, versions, strict=True)] == [
        1, 0, 1, 1, 1, 1
    ]  # fmt: skip
    assert out._version == 1


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
    eps=st.floats(1e-8, 1e-2),
    eps_inside_sqrt=st.booleans(),
    bias_correction=st.booleans(),
    maximize=st.booleans(),
    bounds=st.tuples(st.floats(0, 2), st.floats(2, 1e3)),
    made=st.integers(0, 10_000),
    seed=st.integers(0, 99),
)
@example(  # an average that all but cancels its gradient, in a tensor of one element
    sizes=[1, 17, 102, 623], param=F32, grad=F32, masters=False, lr=0.0625, beta1=0.1875,
    beta2=0.0, weight_decay=0.0, eps=2.0**-9, eps_inside_sqrt=False, bias_correction=False,
    maximize=True, bounds=(0.0, 1e3), made=0, seed=45,
)  # fmt: skip
@example(  # a decay that does
    sizes=[97, 97, 2999, 1], param=F32, grad=F32, masters=False, lr=0.0625, beta1=0.375,
    beta2=0.0, weight_decay=0.71875, eps=0.009765625, eps_inside_sqrt=False,
    bias_correction=False, maximize=True, bounds=(0.0, 35.0), made=0, seed=92,
)  # fmt: skip
def test_whatever_the_tensors_and_numbers_a_step_agrees_with_float64(
    op: Any, sizes: list[int], param: torch.dtype, grad: torch.dtype, masters: bool,
    bounds: tuple[float, float], made: int, seed: int, **numbers: Any,
) -> None:  # fmt: skip
    given_tensors = tensors(
        tuple(sizes), param, grad, masters and param != F32, steps=(float(made),), seed=seed
    )
    assert_step(op, given_tensors, min_coeff=bounds[0], max_coeff=bounds[1], **numbers)
