"""opkiln.utils: lists of tensors as one flat tensor and back, and bytes; the op beneath."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample.references import references
from torch import Tensor

import opkiln
from opkiln import utils
from opkiln.errors import ToolchainError, UsageError
from opkiln.ops.utils import flatten as front_end

reference = references("utils")

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def native() -> Any:
    try:
        return opkiln.get_builder("utils", backend="cpu").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native utils here: {error.what}")


@pytest.fixture(params=["native", "reference"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = native() if request.param == "native" else reference
    monkeypatch.setattr(front_end, "functions", found)
    return found


def tensors(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randint(0, 100, (size,), generator=generator).to(dtype) for size in sizes]


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_is_flattened_and_comes_back(dtype: torch.dtype) -> None:
    for sizes in ((0,), (1,), (7, 0, 4095, 1), (300_001, 5, 300_003), (3,) * 2000):
        listed = tensors(sizes, dtype)
        flat = utils.flatten(listed)
        assert torch.equal(flat, torch.cat(listed))
        for view, tensor in zip(utils.unflatten(flat, listed), listed, strict=True):
            assert torch.equal(view, tensor)
        targets = [torch.zeros_like(tensor) for tensor in listed]
        utils.unflatten_into(flat, targets)
        assert all(torch.equal(a, b) for a, b in zip(targets, listed, strict=True))


@pytest.mark.usefixtures("op")
def test_shapes_and_strides_are_of_no_matter() -> None:
    listed = [
        torch.randn(3, 4),
        torch.tensor(5.0),
        torch.randn(6, 8).t(),
        torch.randn(9, 2)[:, ::2],
    ]
    flat = utils.flatten(listed)
    assert torch.equal(flat, torch.cat([tensor.reshape(-1) for tensor in listed]))
    targets = [torch.zeros_like(tensor) for tensor in listed[:2]]
    targets += [torch.zeros(6, 8).t(), torch.zeros(9, 2)[:, ::2]]
    utils.unflatten_into(flat, targets)
    assert all(torch.equal(a, b) for a, b in zip(targets, listed, strict=True))
    assert [view.shape for view in utils.unflatten(flat, listed)] == [t.shape for t in listed]


@pytest.mark.usefixtures("op")
def test_gradients_flow_through_flatten_and_unflatten() -> None:
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (4,))
    ]
    assert torch.autograd.gradcheck(lambda *given: utils.flatten(given), tensors)
    shaped = utils.unflatten(utils.flatten(tensors), tensors)
    sum(each.square().sum() for each in shaped).backward()
    assert all(torch.equal(each.grad, 2 * each) for each in tensors)
    with torch.no_grad():
        assert not utils.flatten(tensors).requires_grad


def test_views_at_odd_addresses_are_written_and_their_neighbours_are_not() -> None:
    memory = torch.full((1000,), 9, dtype=torch.uint8)
    targets = [memory[1:18], memory[33:500]]
    utils.unflatten_into(torch.arange(17 + 467).to(torch.uint8), targets)
    assert set(memory[18:33].tolist()) | set(memory[500:].tolist()) | {int(memory[0])} == {9}
    assert torch.equal(torch.cat(targets), torch.arange(484).to(torch.uint8))


def test_views_share_the_memory_of_the_flat_tensor() -> None:
    flat = torch.arange(6.0)
    (one, two) = utils.unflatten(flat, [torch.empty(2), torch.empty(2, 2)])
    two.zero_()
    assert flat.tolist() == [0, 1, 0, 0, 0, 0]
    assert one.data_ptr() == flat.data_ptr()


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30), wide=st.booleans())
def test_any_sizes_come_back(sizes: list[int], wide: bool) -> None:
    listed = tensors(tuple(sizes), torch.float64 if wide else torch.uint8)
    flat = native().flatten_list(listed)
    assert torch.equal(flat, torch.cat(listed))
    targets = [torch.empty_like(tensor) for tensor in listed]
    native().unflatten_list_(targets, flat)
    assert all(torch.equal(a, b) for a, b in zip(targets, listed, strict=True))


def test_bytes_are_a_view_and_back() -> None:
    for dtype in DTYPES:
        tensor = tensors((12,), dtype)[0].view(3, 4)
        memory = utils.byte_view(tensor)
        assert memory.numel() == tensor.nbytes
        assert memory.data_ptr() == tensor.data_ptr()
        assert torch.equal(utils.from_bytes(memory, dtype, (3, 4)), tensor)
    assert utils.byte_view(torch.empty(0)).numel() == 0
    assert utils.from_bytes(torch.empty(0, dtype=torch.uint8), torch.float32, (0, 3)).shape == (
        0,
        3,
    )
    assert utils.byte_view(torch.tensor(1.0)).tolist() == [0, 0, 128, 63]


@pytest.mark.usefixtures("op")
def test_what_cannot_be_is_refused_by_name_and_nothing_is_written() -> None:
    a, b = torch.zeros(3), torch.ones(4)
    flat = torch.arange(7.0)
    cases = {
        "tensors is empty": lambda: utils.flatten([]),
        "tensors[1] has dtype float16, expected that of tensors[0], float32": (
            lambda: utils.flatten([a, b.half()])
        ),
        "tensors[1] is not dense": lambda: utils.flatten([a, b.to_sparse()]),
        "tensors[1] is not on the CPU": lambda: utils.flatten([a, b.to("meta")]),
        "flat has 7 elements, tensors have 3": lambda: utils.unflatten_into(flat, [a]),
        "flat has 6 elements, the tensors have 7": lambda: utils.unflatten(flat[1:], [a, b]),
        "expected one dimension without gaps": lambda: utils.unflatten(flat.view(7, 1), [a, b]),
        "tensor is not contiguous": lambda: utils.byte_view(torch.zeros(4, 4).t()),
        "memory has 7 bytes, (2,) of torch.float32 8": lambda: utils.from_bytes(
            torch.zeros(7, dtype=torch.uint8), torch.float32, (2,)
        ),
        "memory has dtype torch.int8": lambda: utils.from_bytes(
            torch.zeros(8, dtype=torch.int8), torch.float32, (2,)
        ),
        "memory starts at byte 1 of its storage, expected a multiple of 4": (
            lambda: utils.from_bytes(torch.zeros(9, dtype=torch.uint8)[1:], torch.float32, (2,))
        ),
    }
    for message, call in cases.items():
        with pytest.raises(UsageError) as refused:
            call()
        assert message in str(refused.value)
    assert a.tolist() == [0] * 3
    assert b.tolist() == [1] * 4


def test_the_op_itself_names_what_it_refuses(op: Any) -> None:
    a, b = torch.zeros(3), torch.ones(4)
    for message, call in {
        "tensors is empty": lambda: op.flatten_list([]),
        "tensors[1] has dtype float16, expected that of tensors[0], float32": lambda: (
            op.flatten_list([a, b.half()])
        ),
        "flat has 6 elements, tensors have 7": lambda: op.unflatten_list_([a, b], torch.ones(6)),
        "flat has dtype float64": lambda: op.unflatten_list_([a, b], torch.ones(7).double()),
    }.items():
        if op is not reference and "empty" in message:
            continue  # the dispatcher chooses by the tensors, and there are none
        with pytest.raises(RuntimeError) as refused:
            call()
        assert message in str(refused.value)


def test_opcheck_finds_nothing_and_it_compiles() -> None:
    ops, listed = native(), tensors((5, 0, 33))
    torch.library.opcheck(ops.flatten_list, (listed,))
    torch.library.opcheck(ops.unflatten_list_, ([torch.zeros(5), torch.zeros(3)], torch.ones(8)))

    def double(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        one, two = utils.unflatten(utils.flatten([a, b]) * 2, [a, b])
        return one, two

    utils.flatten(listed)
    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    for got, tensor in zip(compiled(listed[0], listed[2]), (listed[0], listed[2]), strict=True):
        assert torch.equal(got, tensor * 2)


def test_a_stale_gradient_is_noticed() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    utils.unflatten_into(torch.zeros(3), [weight])
    assert weight.tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
