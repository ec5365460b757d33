"""The op fused_adam: its arithmetic in every mode, type and layout of work.

It runs three times: the reference, the native CPU version, and the CUDA kernels themselves, in the
emulator.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adam_oracle import BF16, DTYPES, F16, F32, clone, oracle
from fused_fixtures import fixtures, launches
from fused_oracle import HYPER, assert_step, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import MASTERS, with_gradients
from sample.references import references
from torch import Tensor

from opkiln.ops.optimizing.op_calls import Status

reference = references("fused_adam")

SIZES = (0, 1, 3, 4, 7, 1023, 1024, 4095, 4096, 4097, 30_003)


kernel_fixture, op_fixture = fixtures("fused_adam")


@pytest.mark.parametrize(("param", "masters", "grad"), with_gradients(MASTERS))
def test_every_mix_of_types_and_sizes_agrees_with_float64(
    op: Any, param: torch.dtype, masters: bool, grad: torch.dtype
) -> None:
    assert_step(op, tensors(SIZES, param, grad, masters))


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_mode_agrees_with_float64(
    op: Any, adamw_mode: bool, maximize: bool, bias_correction: bool, weight_decay: float
) -> None:
    assert_step(
        op, tensors((33, 1000)), adamw_mode=adamw_mode, maximize=maximize,
        bias_correction=bias_correction, weight_decay=weight_decay,
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{"beta1": 0.0}, {"beta2": 0.0}, {"eps": 0.1}, {"lr": 0.0}])
def test_numbers_at_their_limits_agree_with_float64(op: Any, changes: dict[str, float]) -> None:
    assert_step(op, tensors((100,), steps=(0.0,)), **changes)
    assert_step(op, tensors((100,), steps=(1e6,)), **changes)


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_fp32_stays_within_1e_6_of_float64_after_100_steps(op: Any, adamw_mode: bool) -> None:
    given = tensors((5000,), steps=(0.0,))
    params, _, exp_avgs, exp_avg_sqs, _, steps = given
    exp_avgs[0].zero_()
    exp_avg_sqs[0].zero_()
    exact = tuple(t[0].double() for t in (params, exp_avgs, exp_avg_sqs))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 101):
        hyper = {**HYPER, "lr": 1e-3, "adamw_mode": adamw_mode}
        grad = torch.randn(5000, generator=generator)
        op.fused_adam_(params, [grad], exp_avgs, exp_avg_sqs, [], steps, **hyper)
        exact = oracle(exact[0], grad, exact[1], exact[2], {**hyper, "step": step, "grad_scale": 1})
    assert steps[0] == 100
    for got, value in zip((params, exp_avgs, exp_avg_sqs), exact, strict=True):
        assert (got[0].double() - value).norm() <= 1e-6 * value.norm()


def test_one_call_takes_tensors_of_all_types_and_sizes(op: Any) -> None:
    mixed: list[list[Tensor]] = [[], [], [], [], [], []]
    for i, size in enumerate((30_007, 3, 0, 4096, 1, 65)):
        for j, param in enumerate(DTYPES):
            more = tensors((size,), param, DTYPES[i % 3], (i + j) % 2 == 1 and param != F32)
            for row, added in zip(mixed[:5], more[:5], strict=True):
                row.extend(added or [torch.empty(0)])
    mixed[5] = [torch.tensor(4.0)]
    assert_step(op, mixed)


def test_parameters_may_be_at_steps_of_their_own(op: Any) -> None:
    sizes = (5, 5000, 9, 4096, 1)
    assert_step(op, tensors(sizes, steps=(0.0, 7.0, 7.0, 123.0, 1.0)))


@pytest.mark.parametrize("count", [150, pytest.param(1100, marks=pytest.mark.full)])
def test_a_list_of_any_length_is_stepped(op: Any, count: int) -> None:
    sizes = tuple(1 + i % 37 for i in range(count))
    assert_step(op, tensors(sizes))
    assert_step(op, tensors(sizes, steps=tuple(float(i % 5) for i in range(count))))


def test_a_list_of_any_length_takes_two_launches(kernel: Any) -> None:
    # The coefficients and the counts, and the step.
    for sizes, expected in (((40,), 2), ((40,) * 50, 2), ((40,) * 1100, 2), ((0, 0), 1)):
        lists = tensors(sizes)
        plan, ticket = kernel.fused_adam_keep(*lists)
        before = launches("fused_adam")
        assert kernel.fused_adam_kept_(plan, ticket, lists[1], **HYPER) == Status.MADE
        assert launches("fused_adam") - before == expected


# Addresses


@pytest.mark.parametrize("param", [F32, BF16], ids=str)
@pytest.mark.parametrize("shifted", range(6), ids=("params", "grads", "m", "v", "masters", "all"))
def test_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not(
    op: Any, shifted: int, param: torch.dtype
) -> None:
    whole = tensors((6000,), param, F16, masters=param != F32)
    before = clone(whole)
    for offset, size in ((1, 17), (2, 64), (3, 5000), (4, 5000)):

        def part(row: int, of: list[list[Tensor]]) -> list[Tensor]:
            start = offset if shifted in (row, 5) else 8  # noqa: B023
            return [tensor[start : start + size] for tensor in of[row]]  # noqa: B023

        assert_step(op, [*(part(row, whole) for row in range(5)), whole[5]])
        for row in range(5):
            for tensor, old in zip(whole[row], before[row], strict=True):
                start = offset if shifted in (row, 5) else 8
                assert torch.equal(tensor[:start], old[:start])
                assert torch.equal(tensor[start + size :], old[start + size :])
        whole = clone(before)


# What only the device knows


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_learning_rate_in_a_tensor_stands_in_for_the_number(
    op: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    rate = torch.full(shape, 0.003, dtype=dtype)
    assert_step(op, tensors((7, 5000)), {"lr_tensor": rate}, lr=math.nan)


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_gradients_are_divided_by_the_scale(op: Any, scale: float) -> None:
    lists = tensors((33, 5000))
    lists[1] = [grad * scale for grad in lists[1]]
    assert_step(op, lists, {"grad_scale": torch.tensor([scale])})


@pytest.mark.parametrize("steps", [(2.0,), (2.0, 3.0)])
def test_nothing_changes_where_a_gradient_is_not_finite(op: Any, steps: tuple[float, ...]) -> None:
    lists = tensors((33, 5000), BF16, BF16, masters=True, steps=steps)
    lists[1][1][7] = math.inf
    before = clone(lists)
    op.fused_adam_(*lists, **HYPER, found_inf=torch.tensor([1.0]))
    for row, old in zip(lists, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, old, strict=True))
    lists[1][1][7] = 0.0
    assert_step(op, lists, {"found_inf": torch.tensor([0.0])})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_travel_as_in_torch(op: Any, dtype: torch.dtype) -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    # Every odd parameter meets every odd gradient.
    param, grad = odd.repeat_interleave(5).to(dtype), odd.repeat(5).to(dtype)
    theirs = torch.nn.Parameter(param.float())
    theirs.grad = grad.float()
    torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, foreach=False).step()
    zeros = [torch.zeros(25), torch.zeros(25)]
    hyper = {**HYPER, "beta2": 0.999}
    op.fused_adam_([param], [grad], [zeros[0]], [zeros[1]], [], [torch.tensor(0.0)], **hyper)
    expected = theirs.detach().to(dtype)
    assert torch.equal(param.isnan(), expected.isnan())
    assert torch.equal(param.isinf(), expected.isinf())
    torch.testing.assert_close(param, expected, equal_nan=True)


SPECIAL = [
    0.0, -0.0, 1.0, 65504.0, 65519.99, 65520.0, 1e30, -3.4e38, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24,
    2.0**-133, 1e-45, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, math.inf,
    -math.inf, math.nan,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_parameter_is_what_its_master_converts_to(op: Any, dtype: torch.dtype) -> None:
    master = torch.cat([torch.tensor(SPECIAL), torch.randn(1000)])
    param = torch.full_like(master, 7, dtype=dtype)
    zeros = [torch.zeros_like(master) for _ in range(3)]
    before = master.clone()
    # A zero gradient and no decay leave the values as they are: only the conversion is seen.
    hyper = {**HYPER, "weight_decay": 0.0}
    op.fused_adam_([param], *([z] for z in zeros), [master], [torch.tensor(0.0)], **hyper)
    assert torch.equal(master.nan_to_num(nan=-1), before.nan_to_num(nan=-1))
    assert torch.equal(param.nan_to_num(nan=-1), before.to(dtype).nan_to_num(nan=-1))


# Properties


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the op has no state
)
@given(
    size=st.integers(0, 5000),
    lr=st.floats(1e-6, 0.1),
    beta1=st.floats(0.5, 0.99),
    beta2=st.floats(0.5, 0.9999),
    weight_decay=st.floats(0, 1),
    step=st.integers(0, 10_000),
    adamw_mode=st.booleans(),
)
def test_kernel_and_reference_agree(
    kernel: Any, size: int, lr: float, beta1: float, beta2: float, weight_decay: float,
    step: int, adamw_mode: bool,
) -> None:  # fmt: skip
    hyper = {
        **HYPER, "lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay,
        "adamw_mode": adamw_mode,
    }  # fmt: skip
    ours, theirs = (tensors((size,), steps=(float(step),)) for _ in range(2))
    kernel.fused_adam_(*ours, **hyper)
    reference.fused_adam_(*theirs, **hyper)
    for row in (0, 2, 3, 5):
        torch.testing.assert_close(ours[row][0], theirs[row][0], rtol=2e-6, atol=1e-6)


def test_the_reference_computes_in_float64_where_the_tensors_are() -> None:
    wide = [[tensor.double() for tensor in row] for row in tensors((50,))]
    exact = oracle(*(row[0] for row in wide[:4]), {**HYPER, "step": 3, "grad_scale": 1.0})
    reference.fused_adam_(*wide, **HYPER)
    for row, value in zip((0, 2, 3), exact, strict=True):
        torch.testing.assert_close(wide[row][0], value, rtol=1e-12, atol=1e-14)
