"""deepspeed_quantizer on a GPU: one line per check. Needs torch and nvcc; no pytest, no DeepSpeed.

    PYTHONPATH=src python tests/gpu/deepspeed_quantizer.py [--only WORD]

On an NVIDIA GPU scales are those of an approximate division, as DeepSpeed's are, and the reference
divides exactly. So they are compared to within the two last places that CUDA states for it, and
everything after them bit for bit. deepspeed_on_opkiln.py compares with DeepSpeed's own kernels.
The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from typing import Any

import torch
from checks import Skipped, main  # noqa: F401 (what runs these checks looks for Skipped)
from sample.references import references
from torch import Tensor

import opkiln

reference = references("deepspeed_quantizer")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
FORMATS = list(itertools.product((8, 4), (True, False)))
LAID = (1, 1, 1)
# Groups and their sizes: within a thread, a warp, a block; not whole units; beyond a block.
SHAPES = (
    (1, 2), (7, 8), (1001, 10), (999, 24), (333, 96), (64, 128), (100, 1000), (512, 2048),
    (33, 4104), (9, 16_384), (3, 40_000), (2, 262_144),
)  # fmt: skip


def native() -> Any:
    return opkiln.get_builder("deepspeed_quantizer").jit_load()


def numbers(*shape: int, dtype: torch.dtype = F16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + 0.3).to("cuda", dtype)


def close(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], bits: int) -> None:
    """Scales but for their last places; levels but for what these make of a tie."""
    torch.testing.assert_close(ours[1], theirs[1], rtol=2**-21, atol=0, equal_nan=True)
    here, there = (each[0].view(torch.uint8).int() for each in (ours, theirs))
    halves = ((here, there),) if bits == 8 else ((here >> 4, there >> 4), (here & 15, there & 15))
    for a, b in halves:
        off = (a - b).abs()
        off = torch.minimum(off, 2**bits - off)
        assert int(off.max()) <= 1, int(off.max())
        assert float((off != 0).float().mean()) < 1e-3


def check_it_builds_for_this_gpu_and_serves() -> str:
    began = time.perf_counter()
    builder = opkiln.get_builder("deepspeed_quantizer")
    builder.jit_load()
    assert builder.backend == "cuda", builder.backend
    return f"loaded in {time.perf_counter() - began:.2f} s"


def check_levels_and_scales_are_the_references_but_for_the_division() -> str:
    made = 0
    for dtype, (groups, size), (bits, symmetric), with_zero in itertools.product(
        DTYPES, SHAPES, FORMATS, (False, True)
    ):
        x = numbers(groups, size, dtype=dtype)
        if size > 8:
            x[0, 3], x[-1, 5], x[groups // 2] = math.nan, math.inf, 0.0
        args = (x, groups, bits, symmetric, with_zero, *LAID)
        close(native().deepspeed_quantize(*args), reference.deepspeed_quantize(*args), bits)
        made += 1
    return f"{made} calls"


def check_scales_that_are_powers_of_two_are_exact() -> None:
    """Then the approximate division is exact, and so is everything else."""
    for (groups, size), (bits, symmetric) in itertools.product(SHAPES, FORMATS):
        x = numbers(groups, size).clamp(-1.9, 1.9)
        x[:, 0], x[:, 1] = 2.0, -2.0
        args = (x, groups, bits, symmetric, False, *LAID)
        for a, b in zip(
            native().deepspeed_quantize(*args), reference.deepspeed_quantize(*args), strict=True
        ):
            assert torch.equal(a, b), (groups, size, bits, symmetric)


def check_numbers_come_back_bit_for_bit() -> None:
    for (groups, size), (bits, symmetric), dtype in itertools.product(SHAPES, FORMATS, DTYPES):
        x = numbers(groups, size)
        found = native().deepspeed_quantize(x, groups, bits, symmetric, False, *LAID)
        args = (*found, groups, bits, symmetric, dtype)
        ours, theirs = (m.deepspeed_dequantize(*args) for m in (native(), reference))
        assert torch.equal(ours, theirs), (groups, size, bits, symmetric, dtype)


def check_sums_of_parts_are_the_references_but_for_the_division() -> None:
    for (bits, symmetric), parts, (merged, size) in itertools.product(
        FORMATS, (1, 2, 3, 8, 16), ((1, 10), (3, 6), (2, 64), (1, 1000), (4, 2048), (9, 4096))
    ):
        groups = parts * merged * 2
        found = native().deepspeed_quantize(
            numbers(groups, size) * 100, groups, bits, symmetric, False, *LAID
        )
        rest = (parts, groups, 2, bits, symmetric, True)
        ours, theirs = (m.deepspeed_reduce(*found, *rest) for m in (native(), reference))
        close(ours, theirs, bits)


def check_swizzled_groups_lie_where_the_reference_has_them() -> None:
    for order, size, (bits, symmetric) in itertools.product(
        ((2, 4, 1), (3, 2, 5), (1, 8, 2)), (24, 512), FORMATS
    ):
        groups = math.prod(order) * 3
        x = numbers(groups, size)
        plain = native().deepspeed_quantize(x, groups, bits, symmetric, True, *LAID)
        laid = native().deepspeed_quantize(x, groups, bits, symmetric, True, *order)
        nodes, devices, pipeline = order
        own = torch.arange(groups, device="cuda").view(nodes, devices, pipeline, -1)
        at = own.permute(2, 1, 0, 3).reshape(-1)
        assert torch.equal(laid[0].view(groups, -1), plain[0].view(groups, -1)[at])
        assert torch.equal(laid[1], plain[1][at])


def check_views_at_odd_addresses() -> None:
    for dtype, start, (bits, symmetric) in itertools.product(DTYPES, (1, 2, 4), FORMATS):
        whole = numbers(5000, dtype=dtype)
        view = whole[start : start + 4800]
        rest = (5, bits, symmetric)
        ours = native().deepspeed_quantize(view, *rest, False, *LAID)
        there = native().deepspeed_quantize(view.clone(), *rest, False, *LAID)
        assert torch.equal(ours[0], there[0])
        assert torch.equal(ours[1], there[1])
        room = torch.zeros(ours[0].numel() + start, dtype=torch.int8, device="cuda")
        room[start:] = ours[0]
        back = native().deepspeed_dequantize(room[start:], ours[1], *rest, dtype)
        assert torch.equal(back, native().deepspeed_dequantize(*ours, *rest, dtype))


def check_bandwidth() -> str:
    """Against a copy of the tensor: fp16 in groups of 2048, as ZeRO's quantized weights are."""
    x, ops = numbers(1 << 27), native()
    groups, found = x.numel() // 2048, []

    def seconds(call: Any) -> float:
        for _ in range(3):
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 20e3

    out = torch.empty_like(x)
    copy = 2 * x.nbytes / seconds(lambda: out.copy_(x))
    for bits in (8, 4):
        moved = x.nbytes + x.numel() * bits // 8
        args = (x, groups, bits, True, False, *LAID)
        speed = moved / seconds(lambda args=args: ops.deepspeed_quantize(*args))
        levels = ops.deepspeed_quantize(*args)
        rest = (groups, bits, True, F16)
        back = moved / seconds(lambda a=levels, r=rest: ops.deepspeed_dequantize(*a, *r))
        found.append(f"int{bits} {speed / copy:.0%}, back {back / copy:.0%}")
    return f"{'; '.join(found)} of the copy's {copy / 1e9:.0f} GB/s"


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
