"""Adagrad with sparse gradients: the op over rows, and CPUAdagrad beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adam_models import assert_same
from adam_oracle import BF16, DTYPES, F16, F32, assert_stored, clone
from host_oracle import ADAGRAD, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.optim import CPUAdagrad

HYPER = {key: value for key, value in ADAGRAD.hyper.items() if key != "weight_decay"}


@pytest.fixture
def case() -> Case:
    return ADAGRAD


def rows(
    count: int, width: int, chosen: list[int], param: torch.dtype = F32, state: torch.dtype = F32
) -> list[list[Tensor]]:
    """Params, indices, values, sums."""
    generator = torch.Generator().manual_seed(count + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        [normal(count, width).to(param)],
        [torch.tensor(chosen, dtype=torch.int64)],
        [normal(len(chosen), width).to(param)],
        [normal(count, width).square().add(0.01).to(state)],
    ]


def assert_rows(ops: Any, tensors: list[list[Tensor]]) -> None:
    before = clone(tensors)
    ops.cpu_adagrad_rows_(*tensors, [], **HYPER)
    (param,), (indices,), (values,), (total,) = before
    hyper = {**HYPER, "weight_decay": 0.0}
    exact = ADAGRAD.oracle(param[indices], values, total[indices], hyper)
    for row, old, value in ((0, param, exact[0]), (3, total, exact[1])):
        assert_stored(tensors[row][0][indices], value)
        others = torch.ones(len(old), dtype=torch.bool)
        others[indices] = False
        assert torch.equal(tensors[row][0][others], old[others])


@pytest.mark.parametrize(
    ("param", "state"), [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F16)], ids=str
)
@pytest.mark.parametrize("width", [1, 7, 64, 1000])
def test_the_named_rows_are_stepped_and_no_others(
    ops: Any, param: torch.dtype, state: torch.dtype, width: int
) -> None:
    for chosen in ([], [0], [3, 17, 49], list(range(50))):
        assert_rows(ops, rows(50, width, chosen, param, state))


def test_many_rows_are_shared_among_threads(native_ops: Any) -> None:
    assert_rows(native_ops, rows(9000, 130, list(range(0, 9000, 2))))


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chosen=st.sets(st.integers(0, 39)), width=st.integers(1, 40))
def test_rows_are_stepped_as_a_dense_gradient_that_is_zero_elsewhere(
    native_ops: Any, chosen: set[int], width: int
) -> None:
    (param,), (indices,), (values,), (total,) = rows(40, width, sorted(chosen))
    dense = torch.zeros(40, width)
    dense[indices] = values
    whole = param.clone(), total.clone()
    native_ops.cpu_adagrad_rows_([param], [indices], [values], [total], [], **HYPER)
    hyper = {**HYPER, "weight_decay": 0.0}
    native_ops.cpu_adagrad_([whole[0]], [dense], [whole[1]], [], **hyper)
    assert torch.equal(param, whole[0])
    assert torch.equal(total, whole[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_and_rollback_touch_those_rows_too(ops: Any, dtype: torch.dtype) -> None:
    tensors = rows(20, 33, [2, 5, 19])
    before = clone(tensors)
    copy = torch.full((20, 33), 7, dtype=dtype)
    for function in (ops.cpu_adagrad_rows_, ops.cpu_adagrad_rows_rollback_):
        function(*tensors, [copy], **HYPER)
        (param,), (indices,), _, _ = tensors
        assert torch.equal(copy[indices], param[indices].to(dtype))
        assert (copy[:2] == 7).all()
    for row in (0, 3):
        torch.testing.assert_close(tensors[row][0], before[row][0], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (1, torch.tensor([1, 20]), r"indices\[0\] names row 20 of 20"),
        (1, torch.tensor([-1, 2]), r"indices\[0\] names row -1 of 20"),
        (1, torch.tensor([4, 4]), r"indices\[0\] is not in ascending order without duplicates"),
        (1, torch.tensor([4, 3]), r"indices\[0\] is not in ascending order without duplicates"),
        (1, torch.tensor([4, 5], dtype=torch.int32), r"indices\[0\] has dtype"),
        (2, torch.zeros(2, 7), r"values\[0\] has 14 elements, which are not 2 rows of params\[0\]"),
        (2, torch.zeros(5), r"values\[0\] has 5 elements, which are not 2 rows of params\[0\]"),
        (2, torch.zeros(2, 5, dtype=torch.int64), r"values\[0\] has dtype"),
        (3, torch.zeros(20, 4), r"sums\[0\] has 80 elements, params\[0\] has 100"),
        (4, torch.zeros(20, 4), r"copies\[0\] has 80 elements, params\[0\] has 100"),
    ],
)
def test_wrong_rows_are_refused_by_name_and_nothing_is_written(
    ops: Any, row: int, value: Tensor, message: str
) -> None:
    tensors = [*rows(20, 5, [1, 3]), [torch.zeros(20, 5)]]
    tensors[row][0] = value
    before = clone(tensors)
    for function in (ops.cpu_adagrad_rows_, ops.cpu_adagrad_rows_rollback_):
        with pytest.raises(RuntimeError, match=message):
            function(*tensors, **HYPER)
    for got, expected in zip(tensors, before, strict=True):
        assert torch.equal(got[0], expected[0])


@pytest.mark.parametrize("row", [0, 2, 3, 4])
def test_tensors_that_are_not_laid_out_in_rows_are_refused_by_name(
    native_ops: Any, row: int
) -> None:
    tensors = [*rows(6, 6, [0, 1, 2, 3, 4, 5]), [torch.zeros(6, 6)]]
    tensors[row][0] = tensors[row][0].t()
    name = ("params", "", "values", "sums", "copies")[row]
    with pytest.raises(RuntimeError, match=rf"{name}\[0\]"):
        native_ops.cpu_adagrad_rows_(*tensors, **HYPER)


@pytest.mark.parametrize("function", ["cpu_adagrad_rows_", "cpu_adagrad_rows_rollback_"])
def test_opcheck_finds_nothing(native_ops: Any, function: str) -> None:
    tensors = [*rows(20, 5, [1, 3]), [torch.zeros(20, 5)]]
    torch.library.opcheck(getattr(native_ops, function), tuple(tensors), HYPER)


# The optimizer


def embeddings(sparse: bool = True) -> list[torch.nn.Embedding]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(torch.nn.Embedding(30, 9, sparse=sparse))
    return made


@pytest.mark.usefixtures("served_by")
@pytest.mark.parametrize("maximize", [False, True])
def test_an_embedding_is_trained_as_torchs_adagrad_does(maximize: bool) -> None:
    mine, other = embeddings()
    bias = [torch.zeros(9, requires_grad=True) for _ in range(2)]
    options = {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1, "maximize": maximize}
    ours = CPUAdagrad([mine.weight, bias[0]], **options)
    theirs = torch.optim.Adagrad([other.weight, bias[1]], foreach=False, **options)
    generator = torch.Generator().manual_seed(3)
    for _ in range(10):
        words = torch.randint(0, 30, (12,), generator=generator)  # some of them twice
        for model, b, optimizer in ((mine, bias[0], ours), (other, bias[1], theirs)):
            optimizer.zero_grad()
            (model(words) + b).square().sum().backward()
            optimizer.step()
    assert_same([mine.weight, bias[0]], [other.weight, bias[1]])
    before = mine.weight.detach().clone()
    ours.step()
    ours.rollback()
    torch.testing.assert_close(mine.weight.detach(), before, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("served_by")
def test_gradients_that_are_sparse_in_two_dimensions_or_parameters_transposed() -> None:
    grad = torch.zeros(4, 3, 5)
    grad[1, 2], grad[3, 0] = 1.0, 2.0
    plain = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    odd = plain.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    params = [tensor.clone().requires_grad_() for tensor in (plain, odd, plain)]
    params[0].grad, params[1].grad = grad.to_sparse(2), grad.to_sparse(2)
    params[2].grad = grad
    assert not params[1].is_contiguous()
    CPUAdagrad(params).step()
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])


@pytest.mark.usefixtures("served_by")
def test_weight_decay_is_refused_before_anything_moves() -> None:
    params = [torch.ones(4, requires_grad=True), torch.ones(6, 3, requires_grad=True)]
    params[0].grad = torch.ones(4)
    params[1].grad = torch.ones(6, 3).to_sparse(1)
    with pytest.raises(UsageError, match=r"weight_decay is 0.1, but there is a sparse gradient"):
        CPUAdagrad(params, weight_decay=0.1).step()
    assert (params[0] == 1).all()
    assert (params[1] == 1).all()


@pytest.mark.usefixtures("served_by")
def test_rollback_needs_a_gradient_of_the_same_kind() -> None:
    (model, _) = embeddings()
    optimizer = CPUAdagrad(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    after = model.weight.detach().clone()
    model.weight.grad = model.weight.grad.to_dense()
    with pytest.raises(UsageError, match="gradient of the last step is missing"):
        optimizer.rollback()
    assert torch.equal(model.weight, after)
