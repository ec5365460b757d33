"""The op deepspeed_quantizer: the native CPU version, and the CUDA kernels themselves, which the
emulator runs, give the bits of the reference.

That the reference's are DeepSpeed's is tested in tests/build/test_compat_deepspeed_quantizer.py.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample.references import references
from stand_in import emulated, poisoned
from torch import Tensor

import opkiln
from opkiln.errors import ToolchainError
from opkiln.ops.deepspeed_quantizer.op import DeepSpeedQuantizerBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

reference = references("deepspeed_quantizer")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FORMATS = list(itertools.product((8, 4), (True, False)))
TYPES = (F32, BF16, F16)
LAID = (1, 1, 1)


@pytest.fixture(scope="module")
def kernel() -> Any:
    return emulated(DeepSpeedQuantizerBuilder)


@pytest.fixture
def native() -> Any:
    try:
        return opkiln.get_builder("deepspeed_quantizer", backend="cpu").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native deepspeed_quantizer here: {error.what}")


@pytest.fixture(params=["kernel", "native"])
def op(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Any:
    found = request.getfixturevalue(request.param)
    with poisoned():
        yield found
    assert "runtime error" not in capfd.readouterr().err  # what the sanitizers saw


def numbers(*shape: int, dtype: torch.dtype = F16, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3).to(dtype)


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """The same bits, but for those of NaN."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(torch.nan_to_num(a, nan=-7e7), torch.nan_to_num(b, nan=-7e7))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_every_format_and_size_has_the_references_bits(
    op: Any, dtype: torch.dtype, bits: int, symmetric: bool
) -> None:
    # Within a thread, a warp, a block; not whole units.
    for groups, size in ((1, 2), (7, 8), (5, 10), (9, 96), (3, 1000), (2, 2048)):
        for with_zero in (False, True):
            x = numbers(groups, size, dtype=dtype)
            if size > 8:
                x[0, 3], x[-1, 5], x[groups // 2] = math.nan, math.inf, 0.0
            rest = (groups, bits, symmetric)
            found = reference.deepspeed_quantize(x, *rest, with_zero, *LAID)
            assert_same(op.deepspeed_quantize(x, *rest, with_zero, *LAID), found)
            for to in TYPES:
                back = reference.deepspeed_dequantize(*found, *rest, to)
                assert_same([op.deepspeed_dequantize(*found, *rest, to)], [back])


def test_a_group_that_no_block_holds_has_the_references_bits(op: Any) -> None:
    x = numbers(40_000)
    args = (1, 4, False, False, *LAID)
    assert_same(op.deepspeed_quantize(x, *args), reference.deepspeed_quantize(x, *args))


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_sums_of_parts_have_the_references_bits(op: Any, bits: int, symmetric: bool) -> None:
    for size, parts, merged in ((10, 3, 1), (8, 1, 1), (6, 2, 3), (64, 8, 2), (1000, 2, 3)):
        groups = parts * merged * 2
        x = numbers(groups, size) * 100
        found = reference.deepspeed_quantize(x, groups, bits, symmetric, False, *LAID)
        rest = (parts, groups, groups // parts // merged, bits, symmetric, True)
        assert_same(op.deepspeed_reduce(*found, *rest), reference.deepspeed_reduce(*found, *rest))


@pytest.mark.parametrize("order", [(2, 4, 1), (3, 2, 5), (1, 8, 2)])
def test_swizzled_groups_lie_where_the_reference_has_them(
    op: Any, order: tuple[int, int, int]
) -> None:
    groups = math.prod(order) * 3
    for bits, symmetric in FORMATS:
        args = (numbers(groups, 24), groups, bits, symmetric, True, *order)
        assert_same(op.deepspeed_quantize(*args), reference.deepspeed_quantize(*args))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("start", [1, 2, 4])
def test_views_at_odd_addresses_are_handled(op: Any, dtype: torch.dtype, start: int) -> None:
    for bits, symmetric in FORMATS:
        view = numbers(500, dtype=dtype)[start : start + 480]
        rest = (5, bits, symmetric)
        found = reference.deepspeed_quantize(view, *rest, False, *LAID)
        assert_same(op.deepspeed_quantize(view, *rest, False, *LAID), found)
        room = torch.zeros(found[0].numel() + start, dtype=torch.int8)
        room[start:] = found[0]
        back = op.deepspeed_dequantize(room[start:], found[1], *rest, dtype)
        assert_same([back], [reference.deepspeed_dequantize(*found, *rest, dtype)])


def test_a_fused_sum_is_rounded_once() -> None:
    levels = torch.tensor([[3, 1, -1]], dtype=torch.int8)
    # 1 and half of its last place, and a little: rounded to 53 bits first it would be a tie.
    scale, offset = torch.tensor(2.0**-24 * (1 + 2.0**-23)), torch.tensor(1 + 2.0**-23)
    params = torch.stack([scale, offset]).view(1, 2)
    found = reference.deepspeed_dequantize(levels, params, 1, 8, False, F32)
    ulp = 2.0**-23
    assert found.tolist() == [1 + 2 * ulp + ulp, 1 + 2 * ulp, 1.0]


def test_opcheck_finds_nothing(native: Any) -> None:
    x = numbers(4, 32)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    args = (x, 4, 8, True, False, *LAID)
    torch.library.opcheck(native.deepspeed_quantize, args, test_utils=tests)
    found = native.deepspeed_quantize(*args)
    torch.library.opcheck(native.deepspeed_dequantize, (*found, 4, 8, True, F16), test_utils=tests)
    torch.library.opcheck(
        native.deepspeed_reduce, (*found, 2, 4, 2, 8, True, False), test_utils=tests
    )


def test_what_is_refused_is_named_in_the_references_words(native: Any) -> None:
    x, levels, params = numbers(4, 24), torch.zeros(96, dtype=torch.int8), torch.ones(4, 1)
    cases = [
        ("deepspeed_quantize", (x.double(), 4, 8, True, False, *LAID), "x has dtype float64"),
        ("deepspeed_quantize", (x, 4, 3, True, False, *LAID), "bits is 3, expected 4 or 8"),
        ("deepspeed_quantize", (x, 5, 8, True, False, *LAID), "x has 96 elements, expected a mul"),
        ("deepspeed_quantize", (x, 4, 8, True, False, 3, 1, 1), "groups is 4, expected a multiple"),
        ("deepspeed_dequantize", (levels, params, 4, 8, False, F16), "params has 4 elements, exp"),
        ("deepspeed_dequantize", (levels, params.double(), 4, 8, True, F16), "params has dtype fl"),
        ("deepspeed_dequantize", (levels.int(), params, 4, 8, True, F16), "levels has dtype int32"),
        ("deepspeed_dequantize", (levels, params, 4, 8, True, torch.int8), "dtype is int8, expec"),
        ("deepspeed_reduce", (levels, params, 3, 4, 2, 8, True, False), "in_groups is 4, expected"),
        ("deepspeed_reduce", (levels, params, 2, 4, 5, 8, True, False), "the sum has 48 elements"),
    ]  # fmt: skip
    for name, args, text in cases:
        for version in (native, reference):
            with pytest.raises(RuntimeError, match=text):
                getattr(version, name)(*args)
