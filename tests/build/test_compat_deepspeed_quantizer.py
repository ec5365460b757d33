"""DeepSpeed's module ``quantizer`` on opkiln gives DeepSpeed's levels and scales, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_given import warm  # noqa: F401 (a fixture)
from sample import deepspeed_quantizer as oracle
from sample.references import references
from torch import Tensor

from opkiln import get_builder
from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import ToolchainError

reference = references("deepspeed_quantizer")

# Groups of which some fill the threads of DeepSpeed's kernels and some do not, in each of its
# launches; both are known to its asymmetric scales.
SIZES = (8, 24, 32, 96, 128, 136, 256, 512, 1000, 2048, 4096, 4104)
FORMATS = list(itertools.product((4, 8), (True, False)))


@pytest.fixture(scope="module", params=["native", "reference"])
def quantizer(request: pytest.FixtureRequest) -> Iterator[OpModule]:
    functions: Any = reference
    if request.param == "native":
        try:
            functions = get_builder("deepspeed_quantizer", backend="cpu").jit_load()
        except ToolchainError as error:
            pytest.skip(f"no native deepspeed_quantizer here: {error.what}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opkiln.compat.deepspeed.quantizer.functions", functions)
        yield OpModule("quantizer")


def _halves(*shape: int, seed: int = 0, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + mean).half()


def _kind(module: OpModule, symmetric: bool) -> Any:
    return module.Symmetric if symmetric else module.Asymmetric


def _assert_same(ours: Sequence[Tensor], theirs: Sequence[np.ndarray[Any, Any]]) -> None:
    """The same bits, but for those of NaN."""
    for found, expected in zip(ours, theirs, strict=True):
        assert found.numpy().dtype == expected.dtype
        np.testing.assert_array_equal(found.numpy().reshape(expected.shape), expected)


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_quantize_gives_deepspeeds_levels_and_scales(
    quantizer: OpModule, bits: int, symmetric: bool
) -> None:
    for size, mean in itertools.product(SIZES, (0.0, 3.0)):
        x = _halves(5, size, seed=size, mean=mean)
        ours = quantizer.quantize(x, 5, bits, _kind(quantizer, symmetric))
        _assert_same(ours, oracle.quantize(x.numpy(), 5, bits, symmetric))


def test_quantize_to_4_bits_is_as_near_to_the_input_as_deepspeeds(quantizer: OpModule) -> None:
    for size in (64, 256, 2048):
        x = _halves(16, size)
        levels, params = quantizer.quantize(x, 16, 4, quantizer.Symmetric)
        ours = quantizer.dequantize_fp32(levels, params, 16, 4, quantizer.Symmetric)
        theirs = oracle.dequantize(*oracle.quantize(x.numpy(), 16, 4, True), 16, 4, True)
        far = float((ours - x.float()).norm())
        near = float((torch.from_numpy(theirs).view_as(x) - x.float()).norm())
        assert far == near, f"groups of {size}: {far / near - 1:.1%} farther from the input"


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_quantize_of_zeros_infinity_and_nan_is_deepspeeds(
    quantizer: OpModule, bits: int, symmetric: bool
) -> None:
    for size in (16, 24, 512):
        x = _halves(12, size)
        x[0], x[1], x[2] = 0.0, -0.0, 3.0
        x[3, 5], x[4, 5], x[5, 5] = math.nan, math.inf, -math.inf
        x[6], x[7], x[8, :3] = math.nan, math.inf, torch.tensor([math.nan, math.inf, -math.inf])
        x[9] *= 2.0**-24  # subnormal numbers
        x[10], x[11, 3] = x[10].clamp(-1, 1) * 65504, 65504
        ours = quantizer.quantize(x, 12, bits, _kind(quantizer, symmetric))
        _assert_same(ours, oracle.quantize(x.numpy(), 12, bits, symmetric))


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_swizzle_quant_gives_deepspeeds_levels_and_scales(
    quantizer: OpModule, bits: int, symmetric: bool
) -> None:
    for size, (pipeline, nodes, devices) in itertools.product(
        (16, 96, 512, 1000), ((1, 1, 1), (1, 2, 4), (2, 3, 2))
    ):
        groups = pipeline * nodes * devices * 2
        x = _halves(groups, size, mean=1.0)
        order = (pipeline, nodes, devices)
        ours = quantizer.swizzle_quant(x, groups, bits, _kind(quantizer, symmetric), *order)
        _assert_same(ours, oracle.swizzle_quant(x.numpy(), groups, bits, symmetric, *order))


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_dequantize_gives_deepspeeds_numbers(
    quantizer: OpModule, bits: int, symmetric: bool
) -> None:
    for size in (8, 24, 2048):
        x = _halves(6, size, mean=2.0)
        levels, params = oracle.quantize(x.numpy(), 6, bits, symmetric)
        params[1] *= np.float32(0.7)  # scales and offsets with all of their bits in use
        if not symmetric:
            params[2, 1] = params[2, 0] * np.float32(2**-20)
            params[3, 1] = np.float32(1e30)
            params[4] = (np.inf, 1)
        args = (torch.from_numpy(levels).view(6, -1), torch.from_numpy(params), 6, bits)
        expected = oracle.dequantize(levels, params, 6, bits, symmetric)
        kind = _kind(quantizer, symmetric)
        _assert_same([quantizer.dequantize_fp32(*args, kind).view(-1)], [expected])
        with np.errstate(over="ignore"):
            halves = expected.astype(np.float16)
        _assert_same([quantizer.dequantize(*args, kind).view(-1)], [halves])


@pytest.mark.parametrize(("bits", "symmetric"), FORMATS)
def test_quantized_reduction_gives_deepspeeds_levels_and_scales(
    quantizer: OpModule, bits: int, symmetric: bool
) -> None:
    for size, parts, merged in ((16, 3, 1), (64, 8, 2), (96, 2, 1), (1000, 4, 3), (4096, 16, 1)):
        groups = parts * merged * 2  # that go in
        x = _halves(groups, size, mean=0.3)
        levels, params = oracle.quantize(x.numpy(), groups, bits, symmetric)
        out = groups // parts // merged
        ours = quantizer.quantized_reduction(
            torch.from_numpy(levels), torch.from_numpy(params), groups, out, bits,
            _kind(quantizer, symmetric), parts,
        )  # fmt: skip
        theirs = oracle.quantized_reduction(levels, params, groups, out, bits, symmetric, parts)
        _assert_same(ours, theirs)


def test_quantized_reduction_overflows_as_fp16_does(quantizer: OpModule) -> None:
    x = torch.full((4, 32), 40000.0).half()
    x[1, 3], x[3, 3] = -40000.0, 0.0
    levels, params = oracle.quantize(x.numpy(), 4, 8, True)
    args = (4, 2, 8, quantizer.Symmetric, 2)
    ours = quantizer.quantized_reduction(torch.from_numpy(levels), torch.from_numpy(params), *args)
    theirs = oracle.quantized_reduction(levels, params, 4, 2, 8, True, 2)
    assert np.isinf(theirs[1]).all()
    _assert_same(ours, theirs)


@pytest.mark.parametrize("bits", [4, 8])
def test_experimental_dequantize_gives_deepspeeds_numbers(quantizer: OpModule, bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 256, (64, 24), generator=generator, dtype=torch.uint8)
    scales, least = _halves(64).abs() * 30 + 0.01, _halves(64, seed=1)
    size = 24 * 8 // bits
    name = f"dequantize_int{bits}_to_half_experimental"
    ours = getattr(quantizer, name)(levels, scales, least, 64, size)
    theirs = oracle.experimental(levels.numpy(), scales.numpy(), least.numpy(), 64, bits)
    assert ours.shape == (64, size)
    _assert_same([ours], [theirs])
