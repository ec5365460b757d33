"""The op cpu_adam: arithmetic, types, layouts, errors, registration; native and reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@pytest.mark.parametrize("grad", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("param", "state"), [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F32), (F16, F16)], ids=str
)
def test_every_mix_of_types_and_sizes_agrees_with_float64(
    adam: Any, param: torch.dtype, grad: torch.dtype, state: torch.dtype
) -> None:
    assert_step(adam, lists(SIZES, param, grad, state))


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
            tensors = lists(sizes, BF16, F32, F32) + [[torch.zeros(n, dtype=F16) for n in sizes]]
            native_adam.cpu_adam_(*tensors, **HYPER)
            results.append(tensors)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for row, expected in zip(other, results[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, expected, strict=True))


# Layouts


def test_tensors_with_the_same_dense_strides_are_stepped(adam: Any) -> None:
    flat = lists((2 * 3 * 4 * 5,))
    dense = [
        [t.view(2, 3, 4, 5).to(memory_format=torch.channels_last) for t in row] for row in flat
    ]
    adam.cpu_adam_(*flat, [], **HYPER)
    adam.cpu_adam_(*dense, [], **HYPER)
    for row, expected in zip(dense, flat, strict=True):
        torch.testing.assert_close(row[0].reshape(-1), expected[0], rtol=0, atol=0)


def test_other_layouts_are_refused_by_name_and_nothing_is_written(native_adam: Any) -> None:
    for row, name in enumerate(("params", "grads", "exp_avgs", "exp_avg_sqs")):
        for spoil, message in (
            (lambda t: t.new_zeros(6, 8)[:, ::2], "not contiguous"),
            (lambda t: t.new_zeros(4, 6).t(), "laid out differently"),
        ):
            tensors = [[t.view(6, 4) for t in lst] for lst in lists((24, 24))]
            tensors[row][1] = spoil(tensors[row][1])
            before = clone(tensors)
            with pytest.raises(RuntimeError, match=message) as caught:
                native_adam.cpu_adam_(*tensors, [], **HYPER)
            assert f"{name}[1]" in str(caught.value) or name == "params"
            for got, expected in zip(tensors, before, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# Errors


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (1, torch.zeros(5), r"grads\[1\] has 5 elements, params\[1\] has 6"),
        (2, torch.zeros(7), r"exp_avgs\[1\] has 7 elements, params\[1\] has 6"),
        (3, torch.zeros(0), r"exp_avg_sqs\[1\] has 0 elements, params\[1\] has 6"),
        (4, torch.zeros(5), r"copies\[1\] has 5 elements, params\[1\] has 6"),
        (1, torch.zeros(6, dtype=torch.int32), r"grads\[1\] has dtype"),
        (0, torch.zeros(6, dtype=torch.int64), r"params\[1\] has dtype"),
        (1, torch.zeros(6).to_sparse(), r"grads\[1\] is not dense"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name_and_nothing_is_written(
    adam: Any, row: int, value: Tensor, message: str
) -> None:
    tensors = [*lists((6, 6)), [torch.zeros(6), torch.zeros(6)]]
    before = clone(tensors)
    tensors[row][1] = value
    with pytest.raises(RuntimeError, match=message):
        adam.cpu_adam_(*tensors, **HYPER)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("row", "name"), [(1, "grads"), (2, "exp_avgs"), (3, "exp_avg_sqs"), (4, "copies")]
)
def test_a_list_of_another_length_is_refused_by_name(adam: Any, row: int, name: str) -> None:
    tensors = [*lists((6, 6)), [torch.zeros(6), torch.zeros(6)]]
    before = clone(tensors)
    tensors[row].append(torch.zeros(6))
    with pytest.raises(RuntimeError, match=f"{name} has 3 tensors, params has 2"):
        adam.cpu_adam_(*tensors, **HYPER)
    assert torch.equal(tensors[0][0], before[0][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"step": 0}, "step is 0, expected at least 1"), ({"grad_scale": 0.0}, "grad_scale is 0")],
)
def test_a_meaningless_number_is_refused(
    adam: Any, changes: dict[str, Any], message: str
) -> None:
    for function in (adam.cpu_adam_, adam.cpu_adam_rollback_):
        with pytest.raises(RuntimeError, match=message):
            function(*lists((4,)), [], **{**HYPER, **changes})


@pytest.mark.parametrize("dtype", [torch.float64, F16], ids=str)
def test_a_state_is_fp32_or_of_the_params_type(native_adam: Any, dtype: torch.dtype) -> None:
    tensors = lists((6,), BF16, BF16, BF16)
    tensors[2][0] = tensors[2][0].to(dtype)
    with pytest.raises(RuntimeError, match=r"exp_avgs\[0\] has dtype"):
        native_adam.cpu_adam_(*tensors, [], **HYPER)


# Registration


@pytest.mark.parametrize("function", ["cpu_adam_", "cpu_adam_rollback_"])
def test_opcheck_finds_nothing(native_adam: Any, function: str) -> None:
    tensors = [*lists((5, 33)), [torch.zeros(5), torch.zeros(33)]]
    torch.library.opcheck(getattr(native_adam, function), tuple(tensors), HYPER)


def test_a_compiled_function_that_steps_is_one_graph(native_adam: Any) -> None:
    def train(tensors: list[list[Tensor]]) -> Tensor:
        native_adam.cpu_adam_(*tensors, [], **HYPER)
        return tensors[0][0] * 2

    eager, compiled = lists((5, 33)), lists((5, 33))
    expected = train(eager)
    got = torch.compile(train, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(got, expected)
    for row, other in zip(eager, compiled, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


def test_a_stale_gradient_is_noticed(native_adam: Any) -> None:
    tensors = lists((8,))
    param = tensors[0][0].requires_grad_()
    loss = (param * param).sum()
    versions = [row[0]._version for row in tensors]
    with torch.no_grad():
        native_adam.cpu_adam_(*tensors, [], **HYPER)
    bumps = [row[0]._version - old for row, old in zip(tensors, versions, strict=True)]
    assert bumps == [1, 0, 1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Properties

_tensor = st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES), st.sampled_from(DTYPES))


@settings(max_examples=20, deadline=None)
@given(shapes=st.lists(_tensor, min_size=1, max_size=8), wide=st.booleans(), seed=st.integers(0, 99))
def test_a_list_is_stepped_as_its_tensors_one_by_one(
    shapes: list[tuple[int, torch.dtype, torch.dtype]], wide: bool, seed: int
) -> None:
    from conftest import native

    ops = native("cpu_adam")
    together: list[list[Tensor]] = [[], [], [], []]
    for size, param, grad in shapes:
        one = lists((size,), param, grad, F32 if wide else param, seed)
        for row, more in zip(together, one, strict=True):
            row.extend(more)
    apart = clone(together)
    ops.cpu_adam_(*together, [], **HYPER)
    for i in range(len(shapes)):
        ops.cpu_adam_(*([row[i]] for row in apart), [], **HYPER)
    for row, other in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, other, strict=True))


@settings(max_examples=20, deadline=None)
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
    size: int, lr: float, beta1: float, beta2: float, weight_decay: float, step: int,
    adamw_mode: bool,
) -> None:  # fmt: skip
    from conftest import native

    from opkiln.ops.cpu_adam import reference

    changes = {
        "lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "step": step,
        "adamw_mode": adamw_mode,
    }  # fmt: skip
    ours, theirs = lists((size,)), lists((size,))
    native("cpu_adam").cpu_adam_(*ours, [], **{**HYPER, **changes})
    reference.cpu_adam_(*theirs, [], **{**HYPER, **changes})
    for row, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(row[0], other[0], rtol=2e-6, atol=1e-6)
