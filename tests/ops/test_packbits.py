"""The op packbits, native and reference, and its front end."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample.references import references
from stand_in import emulated

from opkiln import get_builder, quant
from opkiln.errors import ToolchainError, UsageError
from opkiln.ops.packbits import signs
from opkiln.ops.packbits.op import PackbitsBuilder

reference = references("packbits")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1e-8, -1e-8]


@pytest.fixture
def native() -> Any:
    try:
        return get_builder("packbits", backend="cpu").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native packbits here: {error.what}")


@pytest.fixture(params=["native", "reference"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = reference if request.param == "reference" else request.getfixturevalue("native")
    monkeypatch.setattr(signs, "functions", found)
    return found


def test_the_first_element_is_the_highest_bit_and_one_is_not_negative(op: Any) -> None:
    x = torch.tensor([1.0, -1.0, 2.0, 3.0, -4.0, -5.0, -6.0, 7.0, 8.0])
    assert op.packbits(x).tolist() == [0b10110001, 0b10000000]
    back = op.unpackbits(torch.tensor([0b10110001, 0b10000000], dtype=torch.uint8), 9, x.dtype)
    assert back.tolist() == [1, -1, 1, 1, -1, -1, -1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 511, 512, 4095, 100_003])
def test_every_size_and_address_has_the_references_bits(
    native: Any, dtype: torch.dtype, count: int
) -> None:
    whole = torch.cat([torch.tensor(ODD), torch.randn(count + 8)]).to(dtype)
    for start in (0, 1, 3):
        x = whole[start : start + count]
        packed = native.packbits(x)
        assert torch.equal(packed, reference.packbits(x))
        back = native.unpackbits(packed, count, dtype)
        assert torch.equal(back, reference.unpackbits(packed, count, dtype))


def test_the_cuda_kernels_have_the_references_bits() -> None:
    kernel = emulated(PackbitsBuilder)
    for dtype, count, start in itertools.product(DTYPES, (0, 1, 9, 4095), (0, 1, 8)):
        x = torch.cat([torch.tensor(ODD), torch.randn(count)]).to(dtype)[start : start + count]
        packed = kernel.packbits(x)
        assert torch.equal(packed, reference.packbits(x))
        back = kernel.unpackbits(packed, count, dtype)
        assert torch.equal(back, reference.unpackbits(packed, count, dtype))


def test_signs_are_sign_bits(op: Any) -> None:
    for dtype, whole, nan in (
        (torch.float32, torch.int32, 0x7FC00000),
        (torch.bfloat16, torch.int16, 0x7FC0),
        (torch.float16, torch.int16, 0x7E00),
    ):
        least = torch.iinfo(whole).min
        x = torch.tensor([0, least, nan, nan + least], dtype=whole).view(dtype)
        assert x.isnan().tolist() == [False, False, True, True]
        assert op.packbits(x).tolist() == [0b10100000]


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.booleans(), max_size=100), st.sampled_from(DTYPES))
def test_a_round_trip_gives_the_signs(native: Any, up: list[bool], dtype: torch.dtype) -> None:
    x = torch.tensor([1.0 if each else -1.0 for each in up], dtype=dtype)
    packed = native.packbits(x)
    assert packed.numel() == (len(up) + 7) // 8
    assert torch.equal(native.unpackbits(packed, len(up), dtype), x)


@pytest.mark.usefixtures("op")
def test_shapes_strides_and_dtypes_are_the_front_ends() -> None:
    x = torch.randn(6, 10).t()
    packed = quant.packbits(x)
    back = quant.unpackbits(packed, x.shape, dtype=torch.float16)
    assert back.dtype == torch.float16
    assert torch.equal(back, x.sign().half())
    assert quant.unpackbits(packed, 60).shape == (60,)


@pytest.mark.usefixtures("op")
def test_wrong_arguments_are_refused_by_name() -> None:
    packed = quant.packbits(torch.randn(20))
    for message, call in (
        ("x has dtype float64", lambda: quant.packbits(torch.randn(3).double())),
        ("x is not dense", lambda: quant.packbits(torch.eye(4).to_sparse())),
        ("shape \\(25,\\) takes 4 bytes, packed has 3", lambda: quant.unpackbits(packed, 25)),
        ("shape \\(-1,\\)", lambda: quant.unpackbits(packed, -1)),
        ("packed has dtype int64", lambda: quant.unpackbits(packed.long(), 20)),
        ("dtype is int8", lambda: quant.unpackbits(packed, 20, dtype=torch.int8)),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_the_op_refuses_by_name(op: Any) -> None:
    packed = op.packbits(torch.randn(20))
    for message, call in (
        ("x has dtype float64, expected float32", lambda: op.packbits(torch.randn(3).double())),
        ("packed has 3 elements, expected 4", lambda: op.unpackbits(packed, 25, torch.float32)),
        ("numel is -1", lambda: op.unpackbits(packed, -1, torch.float32)),
        ("packed has dtype int64", lambda: op.unpackbits(packed.long(), 20, torch.float32)),
        ("dtype is int32", lambda: op.unpackbits(packed, 20, torch.int32)),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_it_passes_opcheck_and_compiles(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "functions", native)
    x = torch.randn(100)
    torch.library.opcheck(native.packbits, (x,))
    torch.library.opcheck(native.unpackbits, (native.packbits(x), 100, torch.bfloat16))

    def call(x: torch.Tensor) -> torch.Tensor:
        return quant.unpackbits(quant.packbits(x * 2), x.shape) * x.abs()

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), x)
