"""Errors of an op reach the caller of a step unchanged, once, and nothing is retried or written.

An op with a genuine error (a kernel that fails, a GPU that is lost) stands in for the native one.
"""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adam_models import give_gradients, parameters
from sample.references import references

import opkiln
from opkiln import optim
from opkiln.compat.deepspeed.optimizers import make_step
from opkiln.ops.optimizing.op_calls import Status, call_in_place

if TYPE_CHECKING:
    from torch import Tensor

HOST = ("CPUAdam", "CPUAdagrad", "CPULion")
FUSED = ("FusedAdam", "FusedLion", "FusedLamb")
HOST_OPS = ("cpu_adam", "cpu_adagrad", "cpu_lion")
OPS = (*HOST_OPS, "fused_adam", "fused_lion", "fused_lamb")
SHAPES = ((3, 5), (17,), (4, 2, 3, 3))


class Ops:
    """An op's reference, which says that it keeps lists and has plans; its functions can be told to
    fail, or what status to return."""

    def __init__(self, op: str) -> None:
        self._reference, self._op = references(op), op
        self._kept: Any = None
        self.error: RuntimeError | None = None
        self.fails = ""
        self.status = Status.MADE
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = name.removeprefix(self._op)
        step = getattr(self._reference, f"{self._op}_")

        def called(*args: Any, **hyper: Any) -> Any:
            self.calls.append(function)
            if function == self.fails:
                assert self.error is not None
                raise self.error
            if function == "_keep":
                self._kept = args
                return torch.ones(1) if self._op in HOST_OPS else (torch.ones(1), torch.ones(1))
            if function == "_forget":
                return None
            if function != "_kept_":
                return getattr(self._reference, name)(*args, **hyper)
            if self.status != Status.MADE:
                return self.status
            params, _, *rest = self._kept
            step(params, args[-1], *rest, **hyper)
            return Status.MADE

        return called


def made(name: str, steps: int, params: list[Tensor]) -> tuple[Any, Ops]:
    kind = getattr(optim, name)
    optimizer = kind(params, lr=1e-2)
    ops = Ops(kind.BUILDER.NAME)
    optimizer._ops = {"cpu": ops}
    optimizer.KEPT_ON = ("cpu",)
    for seed in range(steps):
        give_gradients(params, seed=seed)
        optimizer.step()
    give_gradients(params, seed=steps)
    return optimizer, ops


def everything(optimizer: Any) -> list[tuple[Any, int]]:
    """What a step writes: the tensors with copies of their values, their versions, the counts."""
    found = []
    for param, state in optimizer.state.items():
        for tensor in (param, *state.values()):
            is_tensor = isinstance(tensor, torch.Tensor)
            found.append(
                (tensor, *((tensor.detach().clone(), tensor._version) if is_tensor else ()))
            )
    return found


def assert_untouched(optimizer: Any, before: list[tuple[Any, int]]) -> None:
    now = everything(optimizer)
    assert len(now) == len(before)
    for (tensor, *rest), (same, *was) in zip(now, before, strict=True):
        if rest:
            assert tensor is same
            assert torch.equal(rest[0], was[0])
            assert rest[1] == was[1]
        else:
            assert tensor == same


def assert_raised_once(optimizer: Any, ops: Ops, function: str) -> None:
    before = everything(optimizer)
    ops.error, ops.fails = RuntimeError("CUDA error: an illegal memory access"), function
    ops.calls.clear()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert caught.value is ops.error
    assert ops.calls.count(function) == 1
    assert ops.calls[-1] == function
    assert_untouched(optimizer, before)


# Steps made before the one that fails, and the function that fails: lists, then kept lists.
FAILURES = [(1, "_keep"), (2, "_kept_"), (4, "_kept_")]


@pytest.mark.parametrize("name", [*HOST, *FUSED])
@pytest.mark.parametrize(("steps", "function"), FAILURES)
def test_an_error_of_a_step_over_kept_lists_is_raised_once_and_nothing_is_retried(
    name: str, steps: int, function: str
) -> None:
    params = parameters(*SHAPES)
    optimizer, ops = made(name, steps, params)
    assert_raised_once(optimizer, ops, function)
    ops.fails = ""
    optimizer.step()  # the lists are still kept
    assert ops.calls[-1] == "_kept_"


@pytest.mark.parametrize("name", [*HOST, *FUSED])
def test_an_error_of_a_step_over_lists_is_raised_once(name: str) -> None:
    optimizer, ops = made(name, 0, parameters(*SHAPES))
    ops.error, ops.fails = RuntimeError("CUDA error: an illegal memory access"), "_"
    params = optimizer.param_groups[0]["params"]
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert caught.value is ops.error
    assert ops.calls == ["_"]
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize("name", [*HOST, *FUSED])
def test_an_error_of_a_step_whose_tensors_are_not_contiguous_is_raised_once(name: str) -> None:
    # Channels-last parameters; one gradient is laid out differently, so that it is copied first.
    params = parameters(*SHAPES)
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    optimizer, ops = made(name, 2, params)
    params[2].grad = params[2].grad.contiguous()
    assert params[2].grad.stride() != params[2].stride()
    assert_raised_once(optimizer, ops, "_")


@pytest.mark.parametrize("name", [*HOST, *FUSED])
def test_lists_that_the_op_does_not_have_are_passed_and_kept_again(name: str) -> None:
    optimizer, ops = made(name, 3, parameters(*SHAPES))
    ops.status = Status.NOT_KEPT
    ops.calls.clear()
    optimizer.step()
    ops.status = Status.MADE
    for _ in range(3):
        optimizer.step()
    assert ops.calls[:2] == ["_kept_", "_"]
    assert ops.calls[-1] == "_kept_"
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {7}


@pytest.mark.parametrize("name", [*HOST, *FUSED])
def test_a_gradient_that_is_not_contiguous_is_copied_and_the_lists_are_passed(name: str) -> None:
    params, others = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, ops = made(name, 3, params)
    expected, _ = made(name, 4, others)
    give_gradients(params, seed=3)
    params[0].grad = params[0].grad.t().contiguous().t()
    ops.status = Status.LAYOUT
    ops.calls.clear()
    optimizer.step()
    assert ops.calls[:2] == ["_kept_", "_"]
    assert set(ops.calls[2:]) <= {"_forget"}
    for mine, other in zip(params, others, strict=True):
        assert torch.equal(mine, other)
    assert expected.state[others[0]]["step"] == optimizer.state[params[0]]["step"]


def test_versions_count_up_only_if_the_step_was_made() -> None:
    tensor = torch.zeros(3)
    for status, bumps in ((Status.MADE, 1), (Status.NOT_KEPT, 0), (Status.LAYOUT, 0), (None, 1)):
        version = tensor._version
        call_in_place(lambda: status, [], [[tensor]], {})  # noqa: B023
        assert tensor._version - version == bumps


def test_tensors_of_inference_mode_have_no_version_to_count() -> None:
    with torch.inference_mode():
        inference = torch.zeros(3)
    plain = torch.zeros(3)
    for lists in ([[plain]], [[plain, inference], [plain]]):
        version = plain._version
        call_in_place(lambda: None, [], lists, {})
        assert plain._version > version


def test_an_error_of_a_step_of_deepspeeds_is_raised_once() -> None:
    error, calls = RuntimeError("CUDA error: an illegal memory access"), []

    def op(*lists: Any, **hyper: Any) -> None:
        calls.append(lists)
        raise error

    for grad in (torch.ones(3, 2), torch.ones(2, 3).t()):
        calls.clear()
        with pytest.raises(RuntimeError) as caught:
            make_step(op, [torch.ones(3, 2)], [grad], [[torch.ones(3, 2)]], [[]], {})
        assert caught.value is error
        assert len(calls) == 1


@pytest.mark.parametrize("op", OPS)
def test_a_reference_keeps_no_lists_and_says_so_by_its_status(op: str) -> None:
    reference = references(op)

    def call(name: str) -> Any:
        function = getattr(reference, f"{op}_{name}")
        return function(*([torch.ones(3)] for _ in signature(function).parameters))

    handles = call("keep")
    if op in HOST_OPS:
        handles = [handles]
        assert call("forget") is None
    assert handles[-1].numel() == 0
    assert call("kept_") == Status.NOT_KEPT


def test_the_statuses_of_the_native_ops_are_those_of_python() -> None:
    header = Path(opkiln.__file__).parent / "csrc/opkiln/optimizing/status.h"
    found = re.findall(r"constexpr int64_t k(\w+) = (\d+);", header.read_text())
    named = {status.name.replace("_", "").lower(): status.value for status in Status}
    assert {name.lower(): int(value) for name, value in found} == named


@pytest.mark.parametrize("name", [*HOST, *FUSED])
def test_a_step_over_fake_tensors_is_made(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        params = parameters(*SHAPES)
        optimizer = getattr(optim, name)(params)
        for _ in range(4):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
