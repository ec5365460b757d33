"""The ops cpu_lion and cpu_adagrad: arithmetic in every mode and type, native and reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from adam_oracle import BF16, DTYPES, F16, F32, SIZES, assert_stored, clone
from host_oracle import ADAGRAD, CASES, Case, assert_rolled_back, assert_step, lists
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixes import STATES, with_gradients
from torch import Tensor

pytestmark = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.parametrize(("param", "state", "grad"), with_gradients(STATES))
def test_every_mix_of_types_and_sizes_agrees_with_float64(
    case: Case, ops: Any, reference_ops: Any, param: torch.dtype, grad: torch.dtype,
    state: torch.dtype,
) -> None:  # fmt: skip
    # Ends of vectors and of threads' parts are in the native version alone.
    sizes = SIZES if ops is not reference_ops else (0, 1, 33)
    assert_step(case, ops, lists(case, sizes, param, grad, state))


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("grad_scale", [1.0, 1024.0])
def test_every_mode_agrees_with_float64(
    case: Case, ops: Any, maximize: bool, weight_decay: float, grad_scale: float
) -> None:
    tensors = lists(case, (33, 1000))
    tensors[1] = [g * grad_scale * (-1 if maximize else 1) for g in tensors[1]]
    assert_step(
        case, ops, tensors, maximize=maximize, weight_decay=weight_decay, grad_scale=grad_scale
    )


def test_fp32_stays_within_1e_6_of_float64_after_100_steps(case: Case, ops: Any) -> None:
    params, _, states = lists(case, (5000,))
    states[0].zero_()
    exact = params[0].double(), states[0].double()
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 101):
        changes = {"step": step} if "step" in case.hyper else {}
        hyper = {**case.hyper, "lr": 1e-3, **changes}
        grad = torch.randn(5000, generator=generator)
        getattr(ops, case.function)(params, [grad], states, [], **hyper)
        exact = case.oracle(exact[0], grad, exact[1], hyper)
    for got, value in zip((params, states), exact, strict=True):
        assert (got[0].double() - value).norm() <= 1e-6 * value.norm()


def test_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not(
    case: Case, ops: Any
) -> None:
    for types in ((BF16, F16, F32), (BF16, BF16, F32), (F32, F32, F32)):
        whole = lists(case, (1000,), *types)
        before = clone(whole)
        for offset, size in ((1, 17), (3, 64), (7, 900)):
            views = [[row[0][offset : offset + size]] for row in whole]
            getattr(ops, case.function)(*views, [], **case.hyper)
            exact = case.oracle(*(row[0][offset : offset + size] for row in before), case.hyper)
            for row, value in zip((0, 2), exact, strict=True):
                assert_stored(whole[row][0][offset : offset + size], value)
                assert torch.equal(whole[row][0][:offset], before[row][0][:offset])
                assert torch.equal(whole[row][0][offset + size :], before[row][0][offset + size :])
            whole = clone(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_travel_as_in_torch(case: Case, ops: Any, dtype: torch.dtype) -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    # Every odd parameter meets every odd gradient.
    param, grad = odd.repeat_interleave(5).to(dtype), odd.repeat(5).to(dtype)
    state = torch.zeros(25)
    exact = case.oracle(param.float(), grad.float(), state, case.hyper)
    getattr(ops, case.function)([param], [grad], [state], [], **case.hyper)
    for got, value in zip((param, state), exact, strict=True):
        assert torch.equal(got.isnan(), value.isnan())
        assert torch.equal(got.isinf(), value.to(got.dtype).isinf())
        assert_stored(got.nan_to_num(0, 0, 0), value.nan_to_num(0, 0, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("param", DTYPES, ids=str)
def test_copies_follow_the_step_and_the_rollback(
    case: Case, ops: Any, reference_ops: Any, param: torch.dtype, dtype: torch.dtype
) -> None:
    # The last is long enough to be written around the caches, at an odd address, too.
    sizes = (1, 700) if ops is reference_ops else (1, 700, 600_001)
    tensors = lists(case, sizes, param, param)
    copies = [torch.zeros(n + 1, dtype=dtype)[n % 2 :][:n] for n in sizes]
    for function in (case.function, f"{case.function}rollback_"):
        getattr(ops, function)(*tensors, copies, **case.hyper)
        assert all(torch.equal(c, p.to(dtype)) for c, p in zip(copies, tensors[0], strict=True))


@pytest.mark.parametrize(("param", "state"), [(F32, F32), (BF16, F32), (F16, F16)], ids=str)
def test_rollback_gives_back_what_was_there(
    case: Case, ops: Any, param: torch.dtype, state: torch.dtype
) -> None:
    # A sum that is rounded to 16 bits has lost small squares: that bound is the docstring's, too.
    tensors = lists(case, (1, 17, 5000), param, param, state)
    changes = {} if case is not ADAGRAD or param is F32 else {"weight_decay": 0.0}
    assert_rolled_back(case, ops, tensors, grad_scale=2.0, **changes)


def test_other_numbers_of_threads_do_not_change_a_bit(case: Case, native_ops: Any) -> None:
    sizes = (300_001, 1, 0, 77_777, 1024, 1024, 50_000)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            copies = [torch.zeros(n, dtype=F16) for n in sizes]
            tensors = [*lists(case, sizes, BF16, F32, F32), copies]
            getattr(native_ops, case.function)(*tensors, **case.hyper)
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
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ops have no state
)
_tensor = st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES), st.sampled_from(DTYPES))


@_quick
@given(shapes=st.lists(_tensor, min_size=1, max_size=8), wide=st.booleans(), seed=st.integers(0, 9))
def test_a_list_is_stepped_as_its_tensors_one_by_one(
    case: Case, native_ops: Any, shapes: list[tuple[int, torch.dtype, torch.dtype]], wide: bool,
    seed: int,
) -> None:  # fmt: skip
    together: list[list[Tensor]] = [[], [], []]
    for size, param, grad in shapes:
        one = lists(case, (size,), param, grad, F32 if wide else param, seed)
        for row, more in zip(together, one, strict=True):
            row.extend(more)
    apart = clone(together)
    step = getattr(native_ops, case.function)
    step(*together, [], **case.hyper)
    for i in range(len(shapes)):
        step(*([row[i]] for row in apart), [], **case.hyper)
    for row, other in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


@_quick
@given(size=st.integers(0, 2000), lr=st.floats(1e-6, 0.1), weight_decay=st.floats(0, 1))
def test_native_and_reference_agree(
    case: Case, native_ops: Any, reference_ops: Any, size: int, lr: float, weight_decay: float
) -> None:
    hyper = {**case.hyper, "lr": lr, "weight_decay": weight_decay}
    ours, theirs = lists(case, (size,)), lists(case, (size,))
    getattr(native_ops, case.function)(*ours, [], **hyper)
    getattr(reference_ops, case.function)(*theirs, [], **hyper)
    for row, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(row[0], other[0], rtol=2e-6, atol=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (1, torch.zeros(5), r"{1}\[1\] has 5 elements, params\[1\] has 6"),
        (2, torch.zeros(7), r"{2}\[1\] has 7 elements, params\[1\] has 6"),
        (3, torch.zeros(5), r"copies\[1\] has 5 elements, params\[1\] has 6"),
        (1, torch.zeros(6, dtype=torch.int32), r"{1}\[1\] has dtype"),
        (0, torch.zeros(6, dtype=torch.int64), r"params\[1\] has dtype"),
        (1, torch.zeros(6).to_sparse(), r"{1}\[1\] is not dense"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name_and_nothing_is_written(
    case: Case, ops: Any, row: int, value: Tensor, message: str
) -> None:
    tensors = [*lists(case, (6, 6)), [torch.zeros(6), torch.zeros(6)]]
    before = clone(tensors)
    tensors[row][1] = value
    with pytest.raises(RuntimeError, match=message.format(*case.arguments)):
        getattr(ops, case.function)(*tensors, **case.hyper)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(tensors, before, strict=True))


def test_the_last_of_thousands_is_refused_by_name(case: Case, native_ops: Any) -> None:
    tensors = lists(case, (3,) * 3000)
    before = clone(tensors)
    tensors[2][-1] = torch.zeros(4)
    with pytest.raises(RuntimeError, match=rf"{case.arguments[2]}\[2999\] has 4 elements"):
        getattr(native_ops, case.function)(*tensors, [], **case.hyper)
    assert all(torch.equal(a, b) for a, b in zip(tensors[0], before[0], strict=True))


def test_a_list_of_another_length_is_refused_by_name(case: Case, ops: Any) -> None:
    for row, name in enumerate((*case.arguments, "copies")):
        if row == 0:
            continue
        tensors = [*lists(case, (6, 6)), [torch.zeros(6), torch.zeros(6)]]
        tensors[row].append(torch.zeros(6))
        with pytest.raises(RuntimeError, match=f"{name} has 3 tensors, params has 2"):
            getattr(ops, case.function)(*tensors, **case.hyper)


def test_a_scale_of_zero_is_refused(case: Case, ops: Any) -> None:
    for function in (case.function, f"{case.function}rollback_"):
        with pytest.raises(RuntimeError, match="grad_scale is 0"):
            getattr(ops, function)(*lists(case, (4,)), [], **{**case.hyper, "grad_scale": 0.0})


# Registration


def test_opcheck_finds_nothing(case: Case, native_ops: Any) -> None:
    for function in (case.function, f"{case.function}rollback_"):
        tensors = [*lists(case, (5, 33)), [torch.zeros(5), torch.zeros(33)]]
        torch.library.opcheck(getattr(native_ops, function), tuple(tensors), case.hyper)


def test_a_stale_gradient_is_noticed(case: Case, native_ops: Any) -> None:
    tensors = lists(case, (8,))
    param = tensors[0][0].requires_grad_()
    loss = (param * param).sum()
    versions = [row[0]._version for row in tensors]
    with torch.no_grad():
        getattr(native_ops, case.function)(*tensors, [], **case.hyper)
    bumps = [row[0]._version - old for row, old in zip(tensors, versions, strict=True)]
    assert bumps == [1, 0, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
