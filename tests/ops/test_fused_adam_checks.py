"""The op fused_adam: what it refuses, how it is registered, and that its CUDA library loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adam_oracle import BF16, clone
from fused_oracle import HYPER, ROLES, tensors
from sample import wanted
from sample.references import references
from torch import Tensor

import opkiln
from opkiln.errors import ToolchainError
from opkiln.machine.binary import elf, fatbin
from opkiln.ops.fused_adam.op import FusedAdamBuilder

reference = references("fused_adam")


def _native() -> Any:
    try:
        return opkiln.get_builder("fused_adam").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native fused_adam here: {error.what}")


@pytest.fixture
def native() -> Any:
    return _native()


@pytest.fixture(params=["native", "reference"])
def op(request: pytest.FixtureRequest) -> Any:
    return _native() if request.param == "native" else reference


def given() -> list[list[Tensor]]:
    return tensors((6, 6), BF16, masters=True, steps=(1.0, 1.0))


def assert_refused(op: Any, lists: list[list[Tensor]], message: str, **options: Any) -> None:
    before = clone(lists)
    with pytest.raises(RuntimeError, match=message):
        op.fused_adam_(*lists, **HYPER, **options)
    for row, old in zip(lists, before, strict=True):
        for a, b in zip(row, old, strict=True):
            assert a.is_sparse or a.is_meta or torch.equal(a, b)


@pytest.mark.parametrize("role", [1, 2, 3, 4])
def test_a_tensor_of_another_size_is_refused_by_name(op: Any, role: int) -> None:
    lists = given()
    lists[role][1] = torch.zeros(5)
    assert_refused(op, lists, rf"{ROLES[role]}\[1\] has 5 elements, params\[1\] has 6")


@pytest.mark.parametrize("role", range(6))
def test_a_tensor_of_integers_is_refused_by_name(op: Any, role: int) -> None:
    lists = given()
    lists[role][1] = torch.zeros_like(lists[role][1], dtype=torch.int32)
    assert_refused(op, lists, rf"{ROLES[role]}\[1\] has dtype")


@pytest.mark.parametrize("role", range(1, 6))
def test_a_tensor_elsewhere_is_refused_by_name(role: int) -> None:
    # Of the reference alone: the dispatcher takes a call with a meta tensor for a fake one.
    lists = given()
    lists[role][1] = torch.zeros_like(lists[role][1], device="meta")
    assert_refused(reference, lists, rf"{ROLES[role]}\[1\] is not on the CPU")


@pytest.mark.parametrize("role", [1, 2, 3, 4, 5])
def test_a_list_of_another_length_is_refused_by_name(op: Any, role: int) -> None:
    lists = given()
    lists[role].append(lists[role][0].clone())
    assert_refused(op, lists, f"{ROLES[role]} has 3 tensors, params has 2")


def test_a_sparse_gradient_is_refused_by_name(op: Any) -> None:
    lists = given()
    lists[1][1] = torch.zeros(6).to_sparse()
    assert_refused(op, lists, r"grads\[1\] is not dense")


@pytest.mark.parametrize("role", [2, 3, 4])
def test_states_and_masters_are_fp32(native: Any, role: int) -> None:
    lists = given()
    lists[role][1] = lists[role][1].to(BF16)
    assert_refused(native, lists, rf"{ROLES[role]}\[1\] has dtype bfloat16, expected float32")


def test_a_master_of_an_fp32_parameter_is_refused(native: Any) -> None:
    lists = tensors((6,), masters=True)
    assert_refused(native, lists, r"masters\[0\] is given, but params\[0\] has dtype float32")


def test_other_layouts_are_refused_by_name(native: Any) -> None:
    for role in (1, 2, 3, 4):
        for odd, message in (
            (torch.zeros(6, 8)[:, ::2], "not contiguous"),
            (torch.zeros(4, 6).t(), "laid out differently"),
        ):
            lists = [
                *([t.view(6, 4) for t in row] for row in tensors((24,), BF16, masters=True)[:5])
            ]
            lists.append([torch.tensor(0.0)])
            lists[role][0] = odd
            assert_refused(native, lists, rf"{ROLES[role]}\[0\].* {message}")


def test_a_count_that_two_parameters_share_is_refused(op: Any) -> None:
    lists = given()
    lists[5][1] = lists[5][0]
    assert_refused(op, lists, "steps has a tensor twice")


@pytest.mark.parametrize("name", ["lr_tensor", "grad_scale", "found_inf"])
def test_a_number_in_a_tensor_is_one_floating_point_number(op: Any, name: str) -> None:
    for value, message in (
        (torch.zeros(2), "has 2 elements, expected one"),
        (torch.tensor(1), "has dtype"),
    ):
        assert_refused(op, given(), f"{name} {message}", **{name: value})


# Registration


def test_opcheck_finds_nothing(native: Any) -> None:
    numbers = {
        "lr_tensor": torch.tensor(1e-2), "grad_scale": torch.tensor([2.0]),
        "found_inf": torch.tensor([0.0]),
    }  # fmt: skip
    lists = tensors((5, 33), BF16, masters=True)
    torch.library.opcheck(native.fused_adam_, tuple(lists), {**HYPER, **numbers})
    torch.library.opcheck(native.fused_adam_, tuple(tensors((5, 33), steps=(0.0, 3.0))), HYPER)


def test_a_stale_gradient_is_noticed(native: Any) -> None:
    lists = tensors((8,), BF16, masters=True)
    param = lists[0][0].requires_grad_()
    loss = (param * param).sum()
    versions = [row[0]._version for row in lists]
    with torch.no_grad():
        native.fused_adam_(*lists, **HYPER)
    bumps = [row[0]._version - old for row, old in zip(lists, versions, strict=True)]
    assert bumps == [1, 0, 1, 1, 1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# The CUDA library


@pytest.mark.full  # test_fused_optimizers.py has a smaller op in every run
def test_the_cuda_library_loads_on_a_torch_without_cuda() -> None:
    builder = FusedAdamBuilder(backend="cuda", archs="8.0;9.0a+PTX")
    try:
        builder.jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"there is no nvcc that fits: {error.what}")
    assert torch._C._dispatch_has_kernel_for_dispatch_key("opkiln::fused_adam_", "CUDA")
    library = wanted.artifact(builder.op()).path
    needed = elf.read(library).needed
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "cuda" in name], (
        "cudart is static, torch's is not linked"
    )
    assert fatbin.images(library) == ("sm_80", "sm_90a", "compute_90a")
