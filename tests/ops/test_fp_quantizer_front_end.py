"""FPQuantizer, and what the op refuses, by name; opcheck, torch.compile, version counters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fp_quantizer_oracle import DTYPES, F32, FORMS, same, sample
from sample.references import references

import opkiln
from opkiln.errors import ToolchainError, UsageError
from opkiln.ops.fp_quantizer import quantizer as front_end
from opkiln.quant import FPQuantized, FPQuantizer

reference = references("fp_quantizer")


@pytest.fixture(params=["native", "reference"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The op's functions, which FPQuantizer then runs on."""
    found = reference
    if request.param == "native":
        try:
            found = opkiln.get_builder("fp_quantizer", backend="cpu").jit_load(verbose=False)
        except ToolchainError as error:
            pytest.skip(f"no native fp_quantizer here: {error.what}")
    monkeypatch.setattr(front_end, "functions", found)
    return found


@pytest.fixture
def native(request: pytest.FixtureRequest) -> Any:
    """As the dispatcher calls it."""
    del request
    try:
        return opkiln.get_builder("fp_quantizer", backend="cpu").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native fp_quantizer here: {error.what}")


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_a_tensor_comes_back_in_its_shape_and_dtype(name: str, dtype: torch.dtype) -> None:
    quantizer = FPQuantizer(name, group_size=64)
    x = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = quantizer.quantize(x)
    back = quantizer.dequantize(packed)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    # Half of the last bit, of the largest number at worst.
    step = 2.0 ** -(FORMS[name].mantissa_bits + 1)
    assert bool((back.float() - x.float()).abs().le(x.float().abs().max() * step).all())
    assert packed.numel == 105
    assert packed.nbytes == math.ceil(105 * FORMS[name].bits / 8) + 2 * 4
    assert quantizer.dequantize(packed, dtype=F32).dtype == F32
    rows = quantizer.selective_dequantize(packed, [6, 0, 6])
    assert same(rows, back[[6, 0, 6]])
    assert same(
        quantizer.selective_dequantize(packed, torch.tensor([1], dtype=torch.int32)), back[1:2]
    )


def test_formats_are_found_by_their_bits() -> None:
    for name, form in FORMS.items():
        assert FPQuantizer.of_bits(form.bits, form.mantissa_bits).format.name == name
    assert FPQuantizer.of_bits(8).format.name == "e4m3"
    assert repr(FPQuantizer.of_bits(6, group_size=32)) == "FPQuantizer('e3m2', group_size=32)"


@pytest.mark.usefixtures("op")
def test_an_offset_may_be_a_number_or_a_tensor() -> None:
    quantizer, x = FPQuantizer("e2m1"), sample(1000)
    one, two, other = (
        quantizer.quantize(x, stochastic=True, seed=3, offset=offset).codes
        for offset in (7, torch.tensor(7), 8)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.usefixtures("op")
def test_views_and_tensors_that_require_gradients_are_taken() -> None:
    quantizer = FPQuantizer("e3m2", group_size=16)
    x = sample(600).view(20, 30).requires_grad_()
    packed = quantizer.quantize(x.t())
    assert not packed.scales.requires_grad
    assert same(packed.codes, quantizer.quantize(x.detach().t().contiguous()).codes)


@pytest.mark.usefixtures("op")
def test_what_cannot_be_is_refused_by_name() -> None:
    quantizer, x = FPQuantizer("e4m3", group_size=16), sample(64).view(4, 16)
    packed = quantizer.quantize(x)
    cases = {
        "the format is 'e3m4', expected one of e4m3, e5m2, e3m2, e4m7, e2m1": lambda: FPQuantizer(
            "e3m4"
        ),
        "group_size is 24, expected a multiple of 16": lambda: FPQuantizer(group_size=24),
        "group_size is 131072": lambda: FPQuantizer(group_size=131072),
        "there is no format of 7 bits": lambda: FPQuantizer.of_bits(7),
        "there is no format of 6 bits with 3 of mantissa": lambda: FPQuantizer.of_bits(6, 3),
        "x has dtype float64": lambda: quantizer.quantize(x.double()),
        "x has dtype int64": lambda: quantizer.quantize(x.long()),
        "x is not dense": lambda: quantizer.quantize(x.to_sparse()),
        "offset_tensor has dtype float32, expected int64": lambda: quantizer.quantize(
            x, offset=torch.zeros(1)
        ),
        "offset_tensor has 2 elements, expected 1": lambda: quantizer.quantize(
            x, offset=torch.zeros(2, dtype=torch.int64)
        ),
        "packed is e4m3 in groups of 16, this quantizer's is e4m3 in groups of 512": (
            lambda: FPQuantizer("e4m3").dequantize(packed)
        ),
        "dtype is float64": lambda: quantizer.dequantize(packed, dtype=torch.float64),
        "codes has 63 elements, expected 64": lambda: quantizer.dequantize(
            packed._replace(codes=packed.codes[1:])
        ),
        "codes has dtype int8, expected uint8": lambda: quantizer.dequantize(
            packed._replace(codes=packed.codes.to(torch.int8))
        ),
        "scales has 3 elements, expected 4": lambda: quantizer.dequantize(
            packed._replace(scales=packed.scales[1:])
        ),
        "scales has dtype float16, expected float32": lambda: quantizer.dequantize(
            packed._replace(scales=packed.scales.half())
        ),
        "rows[1] is 4, expected 0 to 3": lambda: quantizer.selective_dequantize(packed, [0, 4]),
        "rows[0] is -1, expected 0 to 3": lambda: quantizer.selective_dequantize(
            packed, torch.tensor([-1])
        ),
        "rows has dtype float32, expected int64": lambda: quantizer.selective_dequantize(
            packed, torch.tensor([1.0])
        ),
        "rows has 2 dimensions, expected 1": lambda: quantizer.selective_dequantize(
            packed, torch.tensor([[1]])
        ),
        "size has no dimension": lambda: quantizer.selective_dequantize(
            quantizer.quantize(torch.tensor(1.0)), []
        ),
    }
    for message, call in cases.items():
        with pytest.raises(UsageError) as refused:
            call()
        assert message in str(refused.value)


def test_the_op_itself_names_what_it_refuses(op: Any) -> None:
    x = sample(64)
    codes, scales = op.fp_quantize(x, 16, 8, 3)
    for message, call in {
        "bits is 8 and mantissa_bits is 4, expected one of e4m3": lambda: op.fp_quantize(
            x, 16, 8, 4
        ),
        "bits is 7 and mantissa_bits is 19": lambda: op.fp_quantize(x, 16, 7, 19),
        "group_size is 0": lambda: op.fp_quantize(x, 0, 8, 3),
        "x has dtype float64": lambda: op.fp_quantize(x.double(), 16, 8, 3),
        "dtype is float64": lambda: op.fp_dequantize(codes, scales, [64], 16, 8, 3, torch.float64),
        "size[1] is -1": lambda: op.fp_dequantize(codes, scales, [64, -1], 16, 8, 3, F32),
    }.items():
        with pytest.raises(RuntimeError) as refused:
            call()
        assert message in str(refused.value)


def test_opcheck_finds_nothing(native: Any) -> None:
    x = sample(1000)
    for args in ((x, 64, 6, 2), (x.half().view(10, 100).t(), 16, 4, 1, True, 1, 2)):
        torch.library.opcheck(native.fp_quantize, args)
    torch.library.opcheck(native.fp_quantize, (x, 64, 12, 7, True, 1, 2, torch.tensor([5])))
    codes, scales = native.fp_quantize(x, 64, 6, 2)
    rest = ([10, 100], 64, 6, 2, torch.bfloat16)
    torch.library.opcheck(native.fp_dequantize, (codes, scales, *rest))
    rows = torch.tensor([1, 5, 1])
    torch.library.opcheck(native.fp_dequantize_rows, (codes, scales, rows, *rest))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(native: Any, dynamic: bool) -> None:
    del native
    quantizer = FPQuantizer("e3m2", group_size=64)

    def round_trip(x: torch.Tensor) -> tuple[FPQuantized, torch.Tensor]:
        packed = quantizer.quantize(x * 2, stochastic=True, seed=4)
        return packed, quantizer.dequantize(packed) + 1

    quantizer.quantize(sample(16))
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size in (1000, 77):
        x = sample(size)
        ours, theirs = compiled(x), round_trip(x)
        assert same(ours[1], theirs[1])
        assert same(ours[0].codes, theirs[0].codes)
        assert ours[0].shape == (size,)


def test_architectures_before_8_0_are_left_out() -> None:
    builder = opkiln.get_builder("fp_quantizer", backend="cuda", archs="7.5;8.0;9.0a;10.0")
    assert builder.filter_ccs(["7.5", "8.0", "8.6", "10.0"]) == ["8.0", "8.6", "10.0"]
    assert "compute_75" not in " ".join(builder.compute_capability_args())
