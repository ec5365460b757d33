"""The op cpu_adam: its arithmetic in every mode and type, native and reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adam_oracle import (
    BF16,
    DTYPES,
    F16,
    F32,
    HYPER,
    SIZES,
    assert_step,
    assert_stored,
    clone,
    lists,
    oracle,
)  # fmt: skip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import STATES, with_gradients
from sample.references import references
from torch import Tensor

reference = references("cpu_adam")


@pytest.mark.parametrize(("param", "state", "grad"), with_gradients(STATES))
def test_every_mix_of_types_and_sizes_agrees_with_float64(
    adam: Any, param: torch.dtype, grad: torch.dtype, state: torch.dtype
) -> None:
    # Ends of vectors and of threads' parts are in the native version alone.
    sizes = (0, 1, 33) if adam is reference else SIZES
    assert_step(adam, lists(sizes, param, grad, state))


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("grad_scale", [1.0, 1024.0, 3.0])
def test_every_mode_agrees_with_float64(
    adam: Any, adamw_mode: bool, maximize: bool, bias_correction: bool, weight_decay: float,
    grad_scale: float,
) -> None:  # fmt: skip
    tensors = lists((33, 1000))
    tensors[1] = [g * grad_scale for g in tensors[1]]
    assert_step(
        adam, tensors, adamw_mode=adamw_mode, maximize=maximize, bias_correction=bias_correction,
        weight_decay=weight_decay, grad_scale=grad_scale,
    )  # fmt: skip


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_fp32_stays_within_1e_6_of_float64_after_100_steps(adam: Any, adamw_mode: bool) -> None:
    params, _, exp_avgs, exp_avg_sqs = lists((5000,))
    exp_avgs[0].zero_()
    exp_avg_sqs[0].zero_()
    exact = tuple(t[0].double() for t in (params, exp_avgs, exp_avg_sqs))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 101):
        hyper = {**HYPER, "step": step, "lr": 1e-3, "adamw_mode": adamw_mode}
        grad = torch.randn(5000, generator=generator)
        adam.cpu_adam_(params, [grad], exp_avgs, exp_avg_sqs, [], **hyper)
        exact = oracle(exact[0], grad, exact[1], exact[2], hyper)
    for got, value in zip((params, exp_avgs, exp_avg_sqs), exact, strict=True):
        assert (got[0].double() - value).norm() <= 1e-6 * value.norm()


def test_one_call_takes_tensors_of_all_types_and_sizes(adam: Any) -> None:
    mixed: list[list[Tensor]] = [[], [], [], []]
    for i, size in enumerate((300_007, 3, 0, 4096, 1, 65)):
        for j, param in enumerate(DTYPES):
            state = param if (i + j) % 2 else F32
            for row, more in zip(mixed, lists((size,), param, DTYPES[i % 3], state), strict=True):
                row.extend(more)
    assert_step(adam, mixed)


def test_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not(adam: Any) -> None:
    whole = lists((1000,), BF16, F16, F32)
    before = clone(whole)
    for offset, size in ((1, 17), (3, 64), (7, 900)):
        adam.cpu_adam_(*([row[0][offset : offset + size]] for row in whole), [], **HYPER)
        exact = oracle(*(row[0][offset : offset + size] for row in before), HYPER)
        for row, value in zip((0, 2, 3), exact, strict=True):
            assert_stored(whole[row][0][offset : offset + size], value)
            assert torch.equal(whole[row][0][:offset], before[row][0][:offset])
            assert torch.equal(whole[row][0][offset + size :], before[row][0][offset + size :])
        whole = clone(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_travel_as_in_torch(adam: Any, dtype: torch.dtype) -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    # Every odd parameter meets every odd gradient.
    param, grad = odd.repeat_interleave(5).to(dtype), odd.repeat(5).to(dtype)
    theirs = torch.nn.Parameter(param.float())
    theirs.grad = grad.float()
    torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, foreach=False).step()
    zeros = [torch.zeros(25), torch.zeros(25)]
    hyper = {**HYPER, "step": 1, "beta2": 0.999}
    adam.cpu_adam_([param], [grad], [zeros[0]], [zeros[1]], [], **hyper)
    expected = theirs.detach().to(dtype)
    assert torch.equal(param.isnan(), expected.isnan())
    assert torch.equal(param.isinf(), expected.isinf())
    torch.testing.assert_close(param, expected, equal_nan=True)


SPECIAL = [
    0.0, -0.0, 1.0, 65504.0, 65519.99, 65520.0, 1e30, -3.4e38, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24,
    2.0**-133, 1e-45, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, math.inf,
    -math.inf, math.nan,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("param", DTYPES, ids=str)
def test_copies_are_what_the_params_convert_to(
    adam: Any, param: torch.dtype, dtype: torch.dtype
) -> None:
    values = torch.cat([torch.tensor(SPECIAL), torch.randn(1000)]).to(param)
    zeros = [torch.zeros_like(values) for _ in range(3)]
    copy = torch.full_like(values, 7, dtype=dtype)
    # A zero gradient and no decay leave the values as they are: only the conversion is seen.
    hyper = {**HYPER, "weight_decay": 0.0}
    before = values.clone()
    adam.cpu_adam_([values], [zeros[0]], [zeros[1]], [zeros[2]], [copy], **hyper)
    assert torch.equal(values.nan_to_num(nan=-1), before.nan_to_num(nan=-1))
    assert torch.equal(copy.nan_to_num(nan=-1), before.to(dtype).nan_to_num(nan=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_follow_the_step_and_the_rollback(adam: Any, dtype: torch.dtype) -> None:
    tensors = lists((1, 700, 30_000))
    copies = [torch.zeros_like(p, dtype=dtype) for p in tensors[0]]
    adam.cpu_adam_(*tensors, copies, **HYPER)
    assert all(torch.equal(c, p.to(dtype)) for c, p in zip(copies, tensors[0], strict=True))
    adam.cpu_adam_rollback_(*tensors, copies, **HYPER)
    assert all(torch.equal(c, p.to(dtype)) for c, p in zip(copies, tensors[0], strict=True))


def assert_rolled_back(adam: Any, tensors: list[list[Tensor]], hyper: dict[str, Any]) -> None:
    """The bound that the reference's docstring states."""
    before = clone(tensors)
    adam.cpu_adam_(*tensors, [], **hyper)
    after = clone(tensors)
    adam.cpu_adam_rollback_(*tensors, [], **hyper)
    for i in range(len(tensors[0])):
        p, g, m, v = (row[i].double() for row in after)
        g = g.abs() / hyper["grad_scale"]
        if not hyper["adamw_mode"]:
            g = g + hyper["weight_decay"] * before[0][i].double().abs()
        moved = (p - before[0][i].double()).abs()
        scales = {
            0: p.abs() + moved,
            2: (m.abs() + g) / hyper["beta1"],
            3: (v + g * g) / hyper["beta2"],
        }
        for row, scale in scales.items():
            kind = torch.finfo(tensors[row][i].dtype)
            unit = kind.eps / 2
            if not hyper["adamw_mode"]:
                unit = max(unit, torch.finfo(tensors[0][i].dtype).eps / 2)
            error = (tensors[row][i].double() - before[row][i].double()).abs()
            # The last term: a narrow type's smallest step, where numbers get tiny.
            assert (error <= 4 * unit * scale + kind.smallest_normal).all()
        assert (tensors[3][i] >= 0).all()


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize(("param", "state"), [(F32, F32), (BF16, F32), (F16, F16)], ids=str)
def test_rollback_gives_back_what_was_there(
    adam: Any, param: torch.dtype, state: torch.dtype, adamw_mode: bool
) -> None:
    tensors = lists((1, 17, 5000), param, param, state)
    hyper = {**HYPER, "adamw_mode": adamw_mode, "grad_scale": 2.0, "maximize": True}
    assert_rolled_back(adam, tensors, hyper)


def test_the_first_step_rolls_back_to_nearly_empty_averages(adam: Any) -> None:
    tensors = lists((1000,))
    for average in (tensors[2][0], tensors[3][0]):
        average.zero_()
    assert_rolled_back(adam, tensors, {**HYPER, "step": 1})


@pytest.mark.parametrize(
    "changes", [{"beta1": 0.0}, {"beta2": 0.0}, {"lr": 0.5, "weight_decay": 2.0}]
)
def test_a_step_that_forgets_its_past_cannot_be_rolled_back(
    adam: Any, changes: dict[str, float]
) -> None:
    tensors = lists((4,))
    before = clone(tensors)
    with pytest.raises(RuntimeError, match="cannot be rolled back"):
        adam.cpu_adam_rollback_(*tensors, [], **{**HYPER, **changes})
    assert all(torch.equal(a[0], b[0]) for a, b in zip(tensors, before, strict=True))


def test_the_number_of_threads_does_not_change_a_bit(native_adam: Any) -> None:
    sizes = (300_001, 1, 0, 77_777, 1024, 1024, 50_000)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            tensors = [*lists(sizes, BF16, F32, F32), [torch.zeros(n, dtype=F16) for n in sizes]]
            native_adam.cpu_adam_(*tensors, **HYPER)
            results.append(tensors)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for row, expected in zip(other, results[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, expected, strict=True))


# Properties

_quick = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the op has no state
)
_tensor = st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES), st.sampled_from(DTYPES))


@_quick
@given(
    shapes=st.lists(_tensor, min_size=1, max_size=8), wide=st.booleans(), seed=st.integers(0, 99)
)
def test_a_list_is_stepped_as_its_tensors_one_by_one(
    native_adam: Any, shapes: list[tuple[int, torch.dtype, torch.dtype]], wide: bool, seed: int
) -> None:
    together: list[list[Tensor]] = [[], [], [], []]
    for size, param, grad in shapes:
        one = lists((size,), param, grad, F32 if wide else param, seed)
        for row, more in zip(together, one, strict=True):
            row.extend(more)
    apart = clone(together)
    native_adam.cpu_adam_(*together, [], **HYPER)
    for i in range(len(shapes)):
        native_adam.cpu_adam_(*([row[i]] for row in apart), [], **HYPER)
    for row, other in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


@_quick
@given(
    size=st.integers(0, 2000),
    lr=st.floats(1e-6, 0.1),
    beta1=st.floats(0.5, 0.99),
    beta2=st.floats(0.5, 0.9999),
    weight_decay=st.floats(0, 1),
    step=st.integers(1, 10_000),
    adamw_mode=st.booleans(),
)
def test_native_and_reference_agree(
    native_adam: Any, size: int, lr: float, beta1: float, beta2: float, weight_decay: float,
    step: int, adamw_mode: bool,
) -> None:  # fmt: skip
    changes = {
        "lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "step": step,
        "adamw_mode": adamw_mode,
    }  # fmt: skip
    ours, theirs = lists((size,)), lists((size,))
    native_adam.cpu_adam_(*ours, [], **{**HYPER, **changes})
    reference.cpu_adam_(*theirs, [], **{**HYPER, **changes})
    for row, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(row[0], other[0], rtol=2e-6, atol=1e-6)
