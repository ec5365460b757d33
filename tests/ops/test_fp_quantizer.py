"""The op fp_quantizer: every format, dtype, size and address.

It runs three times: the reference, the native CPU version, and the CUDA kernels themselves, which
the emulator runs.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fp_quantizer_oracle import (
    BF16,
    DTYPES,
    F16,
    F32,
    FORMS,
    Form,
    nearest_codes,
    numbers,
    same,
    sample,
    scales_of,
    unpack,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instruction_sets import LEVELS, skip_unless_runnable
from sample import child, wanted
from sample.references import references
from stand_in import emulated, poisoned
from torch import Tensor

import opkiln
from opkiln import get_builder
from opkiln.errors import ToolchainError
from opkiln.machine.binary import fatbin
from opkiln.machine.toolchain import hipcc
from opkiln.ops.fp_quantizer import functions as formats
from opkiln.ops.fp_quantizer.op import FPQuantizerBuilder

reference = references("fp_quantizer")

SIZES = (0, 1, 7, 16, 17, 4095)
# Sizes of groups, and of what is quantized: with teams of threads and without, whole tiles and
# parts, and groups that no block of threads can hold.
WORK = (
    (16, 0), (16, 1), (16, 4095), (48, 7), (64, 16), (512, 4095), (528, 4095), (2048, 17),
    (2064, 5003), (16384, 4095), (65536, 20_003),
)  # fmt: skip
# The formats, each with one dtype; with the others in full.
KINDS = [
    pytest.param(form, dtype, id=f"{name}-{dtype}", marks=[pytest.mark.full] * ((i + j) % 3 > 0))
    for i, (name, form) in enumerate(FORMS.items())
    for j, dtype in enumerate(DTYPES)
]


@pytest.fixture(scope="module")
def kernel() -> Any:
    return emulated(FPQuantizerBuilder)


def native() -> Any:
    try:
        return opkiln.get_builder("fp_quantizer", backend="cpu").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native fp_quantizer here: {error.what}")


@pytest.fixture(params=["kernel", "native", "reference"])
def op(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Any:
    if request.param == "reference":
        yield reference
    elif request.param == "native":
        yield native()
    else:
        kernel = request.getfixturevalue("kernel")
        with poisoned():
            yield kernel
        assert "runtime error" not in capfd.readouterr().err  # what the sanitizers saw


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    found: Form = request.param
    return found


def assert_nearest(op: Any, x: Tensor, group_size: int, form: Form) -> None:
    codes, scales = op.fp_quantize(x, group_size, form.bits, form.mantissa_bits)
    expected = scales_of(x, group_size, form)
    assert same(scales, expected)
    each = expected.repeat_interleave(group_size)[: x.numel()]
    scaled = x.reshape(-1).float() * (1 / each)
    right = torch.where(each.isnan(), 0, nearest_codes(scaled.nan_to_num(), form))
    assert torch.equal(unpack(codes, x.numel(), form.bits), right)


@pytest.mark.parametrize(("form", "dtype"), KINDS)
def test_codes_are_those_of_the_nearest_numbers(
    op: Any, form: Form, dtype: torch.dtype, whole_grid: bool
) -> None:
    # The way through the work is the same for all formats and dtypes.
    for group_size, size in WORK if whole_grid or dtype == BF16 else WORK[2:4]:
        assert_nearest(op, sample(size, dtype, size), group_size, form)


def with_largest(values: Tensor, form: Form) -> Tensor:
    """15 values in each row of 16, filled up with zeros, after the largest number."""
    rows = torch.full((-(-len(values) // 15), 16), form.largest)
    flat = torch.zeros(rows.shape[0] * 15)
    flat[: len(values)] = values
    rows[:, 1:] = flat.view(-1, 15)
    return rows


def test_ties_go_to_the_even_code_and_neighbours_do_not(op: Any, form: Form) -> None:
    table = numbers(form).float()
    middles = (table[1:] + table[:-1]) / 2  # fp32 holds them all
    around = [torch.nextafter(middles, torch.tensor(to)) for to in (0.0, math.inf)]
    for values in (table, middles, *around):
        for sign in (1, -1):
            for group_size in (16, 64):
                # With the largest number in each group its scale is 1.
                assert_nearest(op, with_largest(values * sign, form), group_size, form)
    x = torch.cat([table[-1:], middles[:15]])
    codes, scales = op.fp_quantize(x, 16, form.bits, form.mantissa_bits)
    assert scales.tolist() == [1.0]
    assert not (unpack(codes, len(x), form.bits)[1:] % 2).any()


@pytest.mark.parametrize("factor", [1.0, 1e30, 3e-38, 1e-44], ids=str)
def test_the_ends_of_fp32_are_scaled_and_not_lost(op: Any, form: Form, factor: float) -> None:
    x = sample(1000, F32).clamp(-100, 100) * factor
    assert_nearest(op, x, 64, form)
    codes, scales = op.fp_quantize(x, 64, form.bits, form.mantissa_bits)
    assert bool((scales >= 2.0**-126).all())
    back = op.fp_dequantize(codes, scales, [1000], 64, form.bits, form.mantissa_bits, F32)
    assert bool(back.isfinite().all())


def test_fp8_is_torchs(op: Any) -> None:
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        form = FORMS[name]
        x = sample(5000, F32)
        codes, scales = op.fp_quantize(x, 512, form.bits, form.mantissa_bits)
        scaled = x * (1 / scales).repeat_interleave(512)[:5000]
        assert torch.equal(codes, scaled.to(dtype).view(torch.uint8))
        every = torch.arange(256).to(torch.uint8)
        back = op.fp_dequantize(every, torch.ones(1), [256], 256, 8, form.mantissa_bits, F32)
        assert same(back, every.view(dtype).float())


@pytest.mark.parametrize(("form", "dtype"), KINDS)
def test_every_code_comes_back_as_its_number_times_the_scale(
    op: Any, form: Form, dtype: torch.dtype
) -> None:
    table = numbers(form)
    largest = len(table) - 1
    for count in (*SIZES, 3 * 4096):
        wanted = torch.arange(count) % (2 * len(table))
        sign, magnitude = (
            wanted > largest,
            torch.where(wanted > largest, wanted - len(table), wanted),
        )
        codes = magnitude | sign.long() << (form.bits - 1)
        stream = (codes[:, None] >> torch.arange(form.bits) & 1).view(-1)
        stream = torch.cat([stream, stream.new_zeros(-stream.numel() % 8)]).view(-1, 8)
        packed = (stream << torch.arange(8)).sum(1).to(torch.uint8)
        for group_size in (16, 48, 1024):
            scales = sample(-(-count // group_size)).abs() + 0.1
            each = scales.repeat_interleave(group_size)[:count]
            exact = (table[magnitude] * torch.where(sign, -1.0, 1.0)).float() * each
            back = op.fp_dequantize(
                packed, scales, [count], group_size, form.bits, form.mantissa_bits, dtype
            )
            assert same(back, exact.to(dtype))


@pytest.mark.parametrize(("form", "dtype"), KINDS)
def test_nan_and_infinity_make_their_group_nan_and_no_other(
    op: Any, form: Form, dtype: torch.dtype
) -> None:
    for group_size, odd in ((16, math.nan), (48, math.inf), (512, -math.inf), (8192, math.nan)):
        x = sample(3 * group_size, dtype)
        x[group_size + 5] = odd
        assert_nearest(op, x, group_size, form)
        codes, scales = op.fp_quantize(x, group_size, form.bits, form.mantissa_bits)
        assert scales.isnan().tolist() == [False, True, False]
        rest = (group_size, form.bits, form.mantissa_bits, dtype)
        back = op.fp_dequantize(codes, scales, [3, group_size], *rest)
        assert back.isnan().all(1).tolist() == [False, True, False]
        assert back.isnan().any(1).tolist() == [False, True, False]
        stochastic = op.fp_quantize(x, group_size, form.bits, form.mantissa_bits, True)
        assert same(stochastic[1], scales)


def test_zeros_stay_zeros_with_their_signs(op: Any, form: Form) -> None:
    x = torch.tensor([0.0, -0.0] * 40)
    for stochastic in (False, True):
        codes, scales = op.fp_quantize(x, 16, form.bits, form.mantissa_bits, stochastic)
        assert set(scales.tolist()) == {2.0**-126}
        back = op.fp_dequantize(codes, scales, [80], 16, form.bits, form.mantissa_bits, F16)
        assert same(back, x.half())


# Stochastic rounding


@pytest.mark.parametrize(("form", "dtype"), KINDS)
@pytest.mark.parametrize("op", ["kernel", "native"], indirect=True)
def test_stochastic_codes_are_the_references_bit_for_bit(
    op: Any, form: Form, dtype: torch.dtype
) -> None:
    for group_size, size in WORK:
        x = sample(size, dtype, size)
        args = (x, group_size, form.bits, form.mantissa_bits, True, -5 << 40, 1 << 50)
        ours, theirs = op.fp_quantize(*args), reference.fp_quantize(*args)
        assert same(ours[0], theirs[0])
        assert same(ours[1], theirs[1])


def test_random_bits_depend_on_seed_and_offset_and_nothing_else(op: Any) -> None:
    x = sample(1000)

    def codes(*rest: Any) -> Tensor:
        found: Tensor = op.fp_quantize(x, 64, 6, 2, True, *rest)[0]
        return found

    assert torch.equal(codes(1, 2), codes(1, 2))
    assert not torch.equal(codes(1, 2), codes(1, 3))
    assert not torch.equal(codes(1, 2), codes(2, 2))
    assert torch.equal(codes(1, 2), codes(1, 0, torch.tensor([2])))
    assert torch.equal(codes(1, -2), codes(1, 0, torch.tensor(-2)))


def test_stochastic_rounding_takes_one_of_two_neighbours_and_is_unbiased(form: Form) -> None:
    table = numbers(form)
    for value in (0.3, 0.71, 0.01):
        x = torch.full((60_000,), value)
        x[::16] = 1.0
        codes, scales = native().fp_quantize(x, 16, form.bits, form.mantissa_bits, True, 9)
        magnitudes = table[unpack(codes, 60_000, form.bits)].view(-1, 16)
        assert bool((magnitudes[:, 0] == form.largest).all())
        scaled = float(torch.tensor(value) * (1 / scales[0]))
        found = magnitudes[:, 1:].reshape(-1)
        low, high = float(table[table <= scaled][-1]), float(table[table >= scaled][0])
        assert set(found.unique().tolist()) <= {low, high}
        if low < high:
            part = (scaled - low) / (high - low)
            deviation = (high - low) * math.sqrt(part * (1 - part) / found.numel())
            assert abs(float(found.mean()) - scaled) <= 4 * deviation + (high - low) * 2**-16


def test_what_the_format_holds_is_not_rounded(op: Any, form: Form) -> None:
    table = numbers(form).float()
    rows = with_largest(-table, form)
    rest = (64, form.bits, form.mantissa_bits)
    for stochastic in (False, True):
        codes, scales = op.fp_quantize(rows, *rest, stochastic)
        assert torch.equal(op.fp_dequantize(codes, scales, list(rows.shape), *rest, F32), rows)


# Addresses, layouts and rows


@pytest.mark.parametrize(("form", "dtype"), KINDS)
def test_views_at_odd_addresses_are_read_as_they_are(
    op: Any, form: Form, dtype: torch.dtype
) -> None:
    whole = sample(5003, dtype)
    rest = (form.bits, form.mantissa_bits)
    for start in (1, 2, 3, 4, 8):
        x = whole[start:]
        ours, theirs = (op.fp_quantize(each, 128, *rest) for each in (x, x.clone()))
        assert same(ours[0], theirs[0])
        assert same(ours[1], theirs[1])
        shifted = torch.zeros(ours[0].numel() + start, dtype=torch.uint8)
        shifted[start:] = ours[0]
        ours, theirs = (
            op.fp_dequantize(codes, ours[1], [x.numel()], 128, *rest, dtype)
            for codes in (ours[0], shifted[start:])
        )
        assert same(ours, theirs)


@pytest.mark.parametrize(("form", "dtype"), KINDS)
def test_rows_are_those_of_the_whole(op: Any, form: Form, dtype: torch.dtype) -> None:
    rest = (48, form.bits, form.mantissa_bits)
    for size in ([7, 64], [9, 33], [5, 3, 7], [4, 1], [3, 4096], [3, 0], [4, 2, 16]):
        x = sample(math.prod(size), dtype).view(size)
        codes, scales = op.fp_quantize(x, *rest)
        whole = op.fp_dequantize(codes, scales, size, *rest, dtype)
        for rows in ([2, 0, 2, 1], [], [size[0] - 1]):
            chosen = torch.tensor(rows, dtype=torch.int64)
            part = op.fp_dequantize_rows(codes, scales, chosen, size, *rest, dtype)
            assert same(part, whole[chosen])


def test_on_a_gpu_a_row_that_is_not_there_comes_out_as_nan(kernel: Any) -> None:
    for size in ([4, 64], [4, 33]):
        x = sample(math.prod(size)).view(size)
        codes, scales = kernel.fp_quantize(x, 16, 6, 2)
        rows = torch.tensor([1, -1, 4, 1 << 40])
        part = kernel.fp_dequantize_rows(codes, scales, rows, size, 16, 6, 2, BF16)
        assert not part[0].isnan().any()
        assert part[1:].isnan().all()


def test_native_takes_any_strides() -> None:
    x = sample(64 * 48).view(64, 48).t()
    ours, theirs = (native().fp_quantize(each, 64, 6, 2) for each in (x, x.contiguous()))
    assert same(ours[0], theirs[0])
    codes = torch.stack((ours[0], ours[0] + 1), dim=1)[:, 0]
    assert not codes.is_contiguous()
    rest = ([64 * 48], 64, 6, 2, F32)
    assert same(
        native().fp_dequantize(codes, ours[1], *rest),
        native().fp_dequantize(*theirs, *rest),
    )


# Any input


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_numbers_in_any_groups_are_the_nearest(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(list(FORMS.values())))
    dtype = data.draw(st.sampled_from(DTYPES))
    group_size = 16 * data.draw(st.integers(1, 40))
    width = 32 if dtype == F32 else 16
    values = data.draw(st.lists(st.floats(width=width), max_size=700))
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    ops = native()
    assert_nearest(ops, x, group_size, form)
    rest = (group_size, form.bits, form.mantissa_bits)
    codes, scales = ops.fp_quantize(x, *rest, True, data.draw(st.integers(-(2**63), 2**63 - 1)))
    back = ops.fp_dequantize(codes, scales, [len(values)], *rest, F32)
    each = scales.repeat_interleave(group_size)[: len(values)]
    top = x.float().abs() / each <= form.largest
    # Neighbours are nowhere further apart than the largest two, nor is a value from either.
    gap = float(numbers(form)[-1] - numbers(form)[-2])
    within = (back.double() - x.double()).abs() <= (gap + 1e-3) * each.double()
    assert bool((within & top | each.isnan() | ~top).all())
    assert same(back, reference.fp_dequantize(codes, scales, [len(values)], *rest, F32))


def test_the_formats_are_those_of_the_oracle() -> None:
    assert {name: each[1:] for name, each in formats.FORMATS.items()} == FORMS


# Builds for other machines.

_CHECKS = """
import sys
sys.path[:0] = sys.argv[1:]
import fp_quantizer_oracle as oracle
import test_fp_quantizer as checks

ops = checks.native()
for form in oracle.FORMS.values():
    for dtype in oracle.DTYPES:
        checks.test_codes_are_those_of_the_nearest_numbers(ops, form, dtype, whole_grid=True)
        checks.test_stochastic_codes_are_the_references_bit_for_bit(ops, form, dtype)
        checks.test_every_code_comes_back_as_its_number_times_the_scale(ops, form, dtype)
"""


@pytest.mark.full
def test_it_builds_for_an_amd_gpu() -> None:
    if not hipcc.available():
        pytest.skip("no hipcc is installed: apt-get install hipcc")
    op = get_builder("fp_quantizer", backend="rocm", archs="gfx90a").op()
    assert fatbin.hip_images(wanted.artifact(op).path) == ("gfx90a",)


@pytest.mark.full
def test_it_builds_for_nvidia_gpus_with_and_without_instructions_for_fp8() -> None:
    op = get_builder("fp_quantizer", backend="cuda", archs="8.0;9.0a").op()
    try:
        built = wanted.artifact(op)
    except ToolchainError as error:
        pytest.skip(f"no nvcc here: {error.what}")
    assert Path(built.path).stat().st_size > 0


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
def test_a_build_for_another_level_agrees(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_runnable(level)
    monkeypatch.setenv("OPKILN_CPU", level)
    here = Path(__file__).parent
    child.run(_CHECKS, str(here), str(here.parent), bare=False)
