"""The op cpu_adam: the layouts it takes, what it refuses, and how it is registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adam_oracle import BF16, F16, HYPER, clone, lists
from torch import Tensor

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
def test_a_meaningless_number_is_refused(adam: Any, changes: dict[str, Any], message: str) -> None:
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
