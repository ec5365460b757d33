"""The op quantizer: its levels in every format, type and layout of work.

The native CPU version, and the CUDA kernels themselves, which the emulator runs, give the bits of
the reference.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample.references import references
from stand_in import emulated, poisoned
from torch import Tensor

import opkiln
from opkiln.errors import ToolchainError
from opkiln.ops.quantizer.op import QuantizerBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

reference = references("quantizer")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
FORMATS = list(itertools.product((8, 4), (True, False)))
LAID = (1, 1, 1)
# The ways to round to each format, each from one dtype; from the others in full.
KINDS = [
    pytest.param(dtype, *form, stochastic, marks=[pytest.mark.full] * ((i + j) % 3 > 0))
    for i, (form, stochastic) in enumerate(itertools.product(FORMATS, (False, True)))
    for j, dtype in enumerate(DTYPES)
]


@pytest.fixture(scope="module")
def kernel() -> Any:
    return emulated(QuantizerBuilder)


@pytest.fixture
def native() -> Any:
    try:
        return opkiln.get_builder("quantizer", backend="cpu").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native quantizer here: {error.what}")


@pytest.fixture(params=["kernel", "native"])
def op(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Any:
    found = request.getfixturevalue(request.param)
    with poisoned():
        yield found
    assert "runtime error" not in capfd.readouterr().err  # what the sanitizers saw


def numbers(count: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """The same bits, but for those of NaN."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        numbers = (torch.nan_to_num(each, nan=-7e7).contiguous() for each in (a, b))
        assert torch.equal(*(each.view(torch.uint8) for each in numbers))


# Bit for bit


@pytest.mark.parametrize(("dtype", "bits", "symmetric", "stochastic"), KINDS)
def test_every_format_and_size_has_the_references_bits(
    op: Any, dtype: torch.dtype, bits: int, symmetric: bool, stochastic: bool
) -> None:
    # Groups within a thread's neighbours, in a warp, across warps, with and without a short last.
    for count, group in ((0, 16), (1, 16), (7, 16), (4095, 24), (4096, 64), (4095, 1000),
                         (6144, 2048), (9001, 4096)):  # fmt: skip
        x = numbers(count, dtype)
        args = (bits, group, symmetric, stochastic, 7, 3)
        theirs = reference.quantize(x, *args, *LAID)
        assert_same(op.quantize(x, *args, *LAID), theirs)
        back = (*theirs, count, dtype, bits, group, symmetric, *LAID)
        expected = reference.dequantize(*back)
        assert_same([op.dequantize(*back)], [expected])
        assert_same([op.fake_quantize(x, *args)], [expected])
        inside = x.clone()
        op.fake_quantize_(inside, *args)
        assert_same([inside], [expected])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_full_range_has_the_references_bits(op: Any, bits: int, stochastic: bool) -> None:
    for dtype, (count, group) in zip(
        itertools.cycle(DTYPES), ((7, 16), (4095, 24), (4096, 64), (4095, 1000), (6144, 2048))
    ):
        x = numbers(count, dtype)
        if count > 40:
            x[20], x[33] = math.nan, math.inf
        args, full = (bits, group, True, stochastic, 7, 3), (None, False)
        theirs = reference.quantize(x, *args, *LAID, *full)
        assert_same(op.quantize(x, *args, *LAID, *full), theirs)
        expected = reference.fake_quantize(x, *args, *full)
        assert_same([op.fake_quantize(x, *args, *full)], [expected])
        back = (*theirs, count, dtype, bits, group, True, *LAID)
        assert_same([op.dequantize(*back)], [expected])
        error, other = numbers(count, seed=1) * 0.01, numbers(count, seed=1) * 0.01
        ours = op.quantize_with_feedback(x, error, *args, *LAID, *full)
        theirs = reference.quantize_with_feedback(x, other, *args, *LAID, *full)
        assert_same((*ours, error), (*theirs, other))
        parts = ([theirs[0]] * 3, [theirs[1]] * 3, [], count, bits, group, True, 1.0)
        assert_same(
            op.quantized_reduce(*parts, *args, *full),
            reference.quantized_reduce(*parts, *args, *full),
        )


@pytest.mark.parametrize("bits", [8, 4])
def test_the_full_range_uses_the_lowest_level_and_cuts_off_above_the_highest(
    op: Any, bits: int
) -> None:
    half = 2 ** (bits - 1)
    x = torch.tensor([-1.0, 1.0, 0.5, -0.5, *([0.0] * 12)])
    for stochastic in (False, True):
        values, scales, _ = op.quantize(
            x, bits, 16, True, stochastic, 5, 0, *LAID, None, False
        )  # fmt: skip
        back = op.dequantize(
            values, scales, torch.empty(0), 16, F32, bits, 16, True, *LAID
        )  # fmt: skip
        assert scales.tolist() == [1 / half]
        assert (back[:4] * half).tolist() == [-half, half - 1, half / 2, -half / 2]


def test_the_full_range_of_4_bits_is_nearer_to_normal_numbers_than_the_narrow_one(
    native: Any,
) -> None:
    x = numbers(1 << 16)
    for group in (64, 256, 2048):
        narrow, full = (
            float((native.fake_quantize(x, 4, group, True, False, 0, 0, None, each) - x).norm())
            for each in (True, False)
        )
        assert full < 0.97 * narrow


@pytest.mark.parametrize(("dtype", "symmetric"), [(F32, True), (BF16, False), (F16, True)], ids=str)
def test_the_largest_groups_have_the_references_bits(
    op: Any, dtype: torch.dtype, symmetric: bool
) -> None:
    x = numbers(65_536 + 4_000, dtype)
    args = (8, 65_536, symmetric, True, 7, 3)
    assert_same(op.quantize(x, *args, *LAID), reference.quantize(x, *args, *LAID))


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_left_out_is_added_and_kept(
    op: Any, bits: int, symmetric: bool, dtype: torch.dtype
) -> None:
    for count, group in ((7, 16), (4096, 64), (5000, 2048)):
        x, error = numbers(count, dtype), numbers(count, seed=1) * 0.01
        other, wanted = error.clone(), x.float() + error
        args = (bits, group, symmetric, True, 3, 4, *LAID)
        ours = op.quantize_with_feedback(x, error, *args)
        assert_same((*ours, error), (*reference.quantize_with_feedback(x, other, *args), other))
        back = reference.dequantize(*ours, count, F32, bits, group, symmetric, *LAID)
        assert torch.equal(error, wanted - back)


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
@pytest.mark.parametrize(("to_bits", "to_symmetric"), [(8, True), (4, False)])
def test_sums_of_parts_have_the_references_bits(
    op: Any, bits: int, symmetric: bool, to_bits: int, to_symmetric: bool
) -> None:
    for count, group, to_group, ranks in ((7, 16, 16, 1), (4096, 24, 64, 3), (5001, 512, 2048, 8)):
        plain = (bits, group, symmetric, False, 0, 0, *LAID)
        parts = [reference.quantize(numbers(count, seed=i), *plain) for i in range(ranks)]
        lists = [list(row) for row in zip(*parts, strict=True)]
        if symmetric:
            lists[2] = []
        rest = (
            count, bits, group, symmetric, 1 / ranks, to_bits, to_group, to_symmetric, True, 3, 4
        )  # fmt: skip
        assert_same(
            op.quantized_reduce(*lists, *rest), reference.quantized_reduce(*lists, *rest)
        )  # fmt: skip
        error, other = numbers(count, seed=9) * 0.01, numbers(count, seed=9) * 0.01
        ours = op.quantized_reduce_with_feedback(error, *lists, *rest)
        theirs = reference.quantized_reduce_with_feedback(other, *lists, *rest)
        assert_same((*ours, error), (*theirs, other))


@pytest.mark.parametrize("order", [(2, 4, 1), (3, 2, 5), (1, 8, 2), (4, 1, 3)])
@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_swizzled_groups_lie_where_the_reference_has_them(
    op: Any, order: tuple[int, int, int], bits: int, symmetric: bool
) -> None:
    x = numbers(math.prod(order) * 16 * 3, F16)
    args = (bits, 16, symmetric, True, 1, 2)
    ours = op.quantize(x, *args, *order)
    assert_same(ours, reference.quantize(x, *args, *order))
    back = op.dequantize(*ours, x.numel(), F16, bits, 16, symmetric, *order)
    assert_same([back], [reference.fake_quantize(x, *args)])


# Addresses


@pytest.mark.parametrize(
    ("start", "dtype"),
    [
        pytest.param(start, dtype, marks=[pytest.mark.full] * ((i + j) % 3 > 0))
        for i, start in enumerate((1, 2, 3, 4, 7))
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_views_at_odd_addresses_are_handled_and_their_neighbours_left_alone(
    op: Any, dtype: torch.dtype, start: int
) -> None:
    for (bits, symmetric), group in itertools.product(FORMATS, (16, 512)):
        whole = numbers(2000, dtype)
        view = whole[start : start + 1503]
        args = (bits, group, symmetric, True, 1, 2)
        ours = op.quantize(view, *args, *LAID)
        assert_same(ours, reference.quantize(view, *args, *LAID))
        expected = reference.fake_quantize(view, *args)
        room = torch.zeros(ours[0].numel() + start, dtype=ours[0].dtype)
        room[start:] = ours[0]
        back = op.dequantize(
            room[start:], *ours[1:], 1503, dtype, bits, group, symmetric, *LAID
        )  # fmt: skip
        assert_same([back], [expected])
        kept = whole.clone()
        op.fake_quantize_(kept[start : start + 1503], *args)
        assert_same([kept[start : start + 1503]], [expected])
        assert_same([kept[:start]], [whole[:start]])
        assert_same([kept[start + 1503 :]], [whole[start + 1503 :]])


# Numbers that are none


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_a_group_that_is_not_finite_comes_back_as_nan_and_the_others_do_not(
    op: Any, dtype: torch.dtype, bits: int, symmetric: bool
) -> None:
    every = (math.nan, -math.nan, math.inf, -math.inf)
    for odd, stochastic in itertools.product(every, (False, True)):
        x = numbers(16 * 5 + 3, dtype)
        x[20], x[-1] = odd, odd
        args = (bits, 16, symmetric, stochastic, 1, 1)
        values, scales, offsets = op.quantize(x, *args, *LAID)
        assert_same((values, scales, offsets), reference.quantize(x, *args, *LAID))
        assert scales.isnan().tolist() == [False, True, False, False, False, True]
        back = op.dequantize(
            values, scales, offsets, x.numel(), dtype, bits, 16, symmetric, *LAID
        )  # fmt: skip
        expected = torch.zeros(x.numel(), dtype=torch.bool)
        expected[16:32], expected[80:] = True, True
        assert torch.equal(back.isnan(), expected)
        assert torch.equal(op.fake_quantize(x, *args).isnan(), expected)


def test_a_range_beyond_fp32_is_not_finite(op: Any) -> None:
    x = torch.tensor([3e38, -3e38, *([0.0] * 14)])
    values, scales, offsets = op.quantize(x, 8, 16, False, False, 0, 0, *LAID)
    assert scales.isnan().all()
    assert offsets.isnan().all()
    assert not values.any()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_zeros_and_the_smallest_numbers_come_back_as_small(
    op: Any, bits: int, symmetric: bool, stochastic: bool
) -> None:
    x = torch.zeros(64)
    x[16:32], x[32], x[33] = -0.0, 1e-45, -1e-42
    args = (bits, 16, symmetric, stochastic, 1, 1)
    ours = op.quantize(x, *args, *LAID)
    assert_same(ours, reference.quantize(x, *args, *LAID))
    back = op.fake_quantize(x, *args)
    assert (back - x).abs().max() <= 2.0**-126
    assert not back[:32].any()


# Random bits


def test_the_generator_gives_the_known_answers_of_its_authors() -> None:
    # Philox4x32-10 of Random123's kat_vectors: counters and keys of zeros, ones, and digits of pi.
    known = [
        (0, 0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (-1, -1, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (0x85A308D3243F6A88, 0x0370734413198A2E, 0x299F31D0A4093822,
         [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]  # fmt: skip
    for low, high, key, expected in known:
        signed = low - 2**64 if low >= 2**63 else low
        words = reference.philox(torch.tensor([signed]), high, key, rounds=10)
        assert [int(word) for word in words] == expected


def test_random_bits_depend_on_seed_offset_and_index_alone(op: Any) -> None:
    x = torch.full((4096,), 0.3)
    x[::64] = 1.0

    def levels(seed: int, offset: int, tensor: Tensor = x, later: Tensor | None = None) -> Tensor:
        rest = () if later is None else (later,)
        return op.quantize(tensor, 8, 64, True, True, seed, offset, *LAID, *rest)[0]

    assert torch.equal(levels(1, 2), levels(1, 2))
    assert torch.equal(levels(1, 2)[:640], levels(1, 2, x[:640]))
    assert torch.equal(levels(1, 2**40), levels(1, 0, later=torch.tensor(2**40)))
    others = [levels(*pair) for pair in ((1, 2), (2, 2), (1, 3), (1 + 2**32, 2), (1, 2 + 2**32))]
    for one, other in itertools.combinations(others, 2):
        assert not torch.equal(one, other)


# Properties

FLOATS = st.floats(-1e4, 1e4, width=16)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the op has no state
)
@given(
    values=st.lists(FLOATS, max_size=200),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    group=st.sampled_from([16, 24, 64, 65_536]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_a_round_trip_is_off_by_half_a_step_at_most_and_by_one_where_it_is_stochastic(
    native: Any, values: list[float], bits: int, symmetric: bool, group: int, dtype: torch.dtype,
    seed: int,
) -> None:  # fmt: skip
    x = torch.tensor(values, dtype=F32).to(dtype)
    for stochastic, part in ((False, 0.5), (True, 1.0)):
        args = (bits, group, symmetric, stochastic, seed, 0, *LAID)
        three = native.quantize(x, *args)
        assert_same(three, reference.quantize(x, *args))
        back = native.dequantize(*three, x.numel(), F32, bits, group, symmetric, *LAID)
        steps = three[1].repeat_interleave(group)[: x.numel()]
        # Beyond the step: the rounding of fp32 itself, of numbers as large as the group's range.
        slack = 4e-7 * 2**bits * steps + 2e-7 * x.float().abs()
        assert ((back - x.float()).abs() <= part * steps + slack).all()


def test_every_element_has_random_bits_whose_upper_half_is_its_own() -> None:
    bits = reference.random_bits(4096, 5, 9).view(-1, 4)
    words = torch.stack(reference.philox(torch.arange(256), 9, 5), -1).view(-1)
    for i in range(4):
        assert torch.equal(bits[:, i] >> 8, words >> 8 * ((i + 1) % 4) & 0xFF)
        assert torch.equal(bits[:, i] & 0xFF, words >> 8 * i & 0xFF)


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
@pytest.mark.parametrize("part", [0.03, 0.25, 0.5, 0.77])
def test_stochastic_rounding_is_unbiased_within_4_sigma(
    native: Any, bits: int, symmetric: bool, part: float
) -> None:
    top = 2 ** (bits - symmetric) - 1
    x = torch.full((2**20,), 2 + part)
    x[::1024], x[1::1024] = float(top), 0.0  # so that the scale is 1, nearly
    back = native.fake_quantize(x, bits, 1024, symmetric, True, 5, 6).double()
    kept = back.view(-1, 1024)[:, 2:]
    sigma = math.sqrt(part * (1 - part) / kept.numel())
    assert abs(float(kept.mean()) - 2 - part) < 4 * sigma
    # Neighbours go up and down on their own.
    up = (kept > 2.5).double() - part
    assert abs(float((up[:, 1:] * up[:, :-1]).mean())) < 4 * part * (1 - part) / 1000


def test_feedback_makes_up_for_what_rounding_loses_step_by_step(native: Any) -> None:
    x, error = numbers(4096), torch.zeros(4096)
    total = torch.zeros(4096, dtype=torch.float64)
    for _ in range(50):
        three = native.quantize_with_feedback(x, error, 4, 64, True, False, 0, 0, *LAID)
        total += native.dequantize(*three, 4096, F32, 4, 64, True, *LAID)
    once = native.fake_quantize(x, 4, 64, True, False, 0, 0)
    assert (total / 50 - x).abs().max() < 0.05 * (once - x).abs().max()
