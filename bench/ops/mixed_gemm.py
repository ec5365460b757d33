"""Products with packed weights beside bf16 weights, and of experts' tokens beside torch's ways.

    PYTHONPATH=src python bench/ops/mixed_gemm.py [--only WORD] [--out FILE]

All in bf16. The bytes are those of the weights as they are read. Weights take turns, more than
256 MB of them, so that no call finds its own in the GPU's cache. "kernel" and "dequantized" are the
two ways that the front end chooses from. On the CPU the sizes are tiny, to try the script.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Bar, Row
from torch import Tensor
from torch.nn import functional

from opkiln import quant
from opkiln.nn import inference
from opkiln.ops.mixed_gemm.functions import packed_gemm
from opkiln.ops.mixed_gemm.op import FORMATS, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROTATED = 256 << 20
CALLS = 8  # of a turn
SHAPES = ((4096, 4096), (4096, 11_008))  # outputs, inputs
ROWS = (1, 4, 16, 32, 64, 512)
EXPERTS = (((8, 4096, 4096), (16, 128, 4096)), ((64, 2048, 2048), (64, 512, 8192)))
FORMS = {"fp6": "e3m2", "fp8": "e4m3", "int8": "int8", "int4": "int4"}


class Way(NamedTuple):
    """How to do a work: a function of one of the weights that take turns."""

    fn: Callable[[Any], Any]
    weights: Sequence[Any]
    bytes: int


def main() -> int:
    options = harness.options(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    bandwidth = harness.copy_bandwidth(device)
    if gpu:
        with ThreadPoolExecutor() as pool:
            load = partial(packed_gemm.load, "cuda", T="bfloat16")
            list(pool.map(lambda each: load(CODES=each.kind), FORMATS))
    rows: list[Row] = []
    bars: list[Bar] = []
    for outputs, inputs in SHAPES if gpu else ((32, 256),):
        held = Weights((outputs, inputs), device)
        for count in ROWS:
            name = f"linear {outputs} x {inputs}, {count} rows"
            if options.only in name:
                rows += measured(name, linear(held, count, device), device)
                if count <= 16:
                    bars += [Bar(name, form, "torch, bf16 weights", 1.0) for form in FORMS]
    for shape, counts in EXPERTS if gpu else (((3, 32, 256), (5,)),):
        for count in counts:
            name = f"{shape[0]} experts of {shape[1]} x {shape[2]}, {count} rows"
            if options.only in name:
                rows += measured(name, experts(shape, count, device), device)
                bars.append(Bar(name, "opkiln", "torch grouped_mm", 0.97))
    rows += host_rows(device)
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    return 1 if harness.missed(bars, rows, bandwidth) else 0


class Weights:
    """A matrix in each form, as many times as take turns."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        weight = (torch.randn(shape, device=device) / 64).bfloat16()
        group = shape[-1]
        self.wide = repeated(weight, weight.nbytes)
        self.packed: dict[str, tuple[list[Any], int]] = {}
        for name, form in FORMS.items():
            if form.startswith("int"):
                made: Any = quant.quantize(weight, bits=int(form[3:]), group_size=group)
            else:
                made = quant.FPQuantizer(form, group_size=group).quantize(weight)
            self.packed[name] = (repeated(made, made.nbytes), made.nbytes)


def repeated(weight: Any, size: int) -> list[Any]:
    if isinstance(weight, Tensor):
        if not weight.is_cuda:
            return [weight]
        return [weight.clone() for _ in range(-(-ROTATED // size))]
    if not weight[0].is_cuda:
        return [weight]
    copies = range(-(-ROTATED // size))
    return [type(weight)(weight[0].clone(), *weight[1:]) for _ in copies]


def linear(held: Weights, count: int, device: torch.device) -> dict[str, Way]:
    x = torch.randn(count, held.wide[0].shape[1], device=device).bfloat16()
    ways = {
        "torch, bf16 weights": Way(partial(functional.linear, x), held.wide, held.wide[0].nbytes)
    }
    for name, (weights, size) in held.packed.items():
        ways[name] = Way(partial(inference.mixed_gemm, x), weights, size)
        if 16 <= count <= 64:
            ways[f"{name}, kernel"] = Way(partial(kernel, x, None), weights, size)
            ways[f"{name}, dequantized"] = Way(partial(dequantized, x), weights, size)
    return ways


def kernel(x: Tensor, offsets: Tensor | None, weight: Any) -> Tensor:
    form = weight.format if hasattr(weight, "format") else f"int{weight.bits}"
    return packed_gemm(
        x, weight[0], weight.scales, offsets, None, weight.shape[-2], weight.group_size,
        NUMBERS[form], 0,
    )  # fmt: skip


def dequantized(x: Tensor, weight: Any) -> Tensor:
    if hasattr(weight, "format"):
        wide = quant.FPQuantizer(weight.format, group_size=weight.group_size).dequantize(weight)
    else:
        wide = quant.dequantize(weight)
    return functional.linear(x, wide)


def experts(shape: tuple[int, int, int], count: int, device: torch.device) -> dict[str, Way]:
    """Tokens are drawn at random, so experts have different numbers of them."""
    held = Weights(shape, device)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, shape[0], (count,), generator=generator)
    counts = drawn.bincount(minlength=shape[0])
    splits = counts.tolist()
    offsets = counts.cumsum(0).int().to(device)
    x = torch.randn(count, shape[2], device=device).bfloat16()
    used = sum(each > 0 for each in splits) / shape[0]  # the share of the weights that is read
    size = int(held.wide[0].nbytes * used)

    def loop(weight: Tensor) -> list[Tensor]:
        return [part @ each.T for part, each in zip(x.split(splits), weight, strict=True)]

    def one(weight: Tensor) -> Tensor:
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    def plain(weight: Tensor) -> Tensor:
        return packed_gemm(x, weight, None, offsets, None, shape[1], 0, NUMBERS["plain"], 0)

    ways = {
        "opkiln": Way(lambda w: inference.moe_gemm(x, w, offsets), held.wide, size),
        "opkiln, kernel": Way(plain, held.wide, size),
        "torch grouped_mm": Way(one, held.wide, size),
        "loop of mm": Way(loop, held.wide, size),
    }
    for name in ("fp6", "int8"):
        weights, packed = held.packed[name]
        fn = partial(lambda w: inference.mixed_moe_gemm(x, w, offsets))
        ways[f"opkiln, {name}"] = Way(fn, weights, int(packed * used))
    if count > 1024:  # the kernel is for few rows
        del ways["opkiln, kernel"]
    return ways


def measured(work: str, ways: dict[str, Way], device: torch.device) -> list[Row]:
    gpu = device.type == "cuda"
    calls = {name: [partial(way.fn, each) for each in way.weights] for name, way in ways.items()}
    taken = harness.rotated(calls, CALLS, device, 20 if gpu else 1)
    return [Row(work, name, ways[name].bytes, *time) for name, time in taken.items()]


def host_rows(device: torch.device) -> list[Row]:
    """The host's time for a call with little to do, beside that of an eager ``x + x``."""
    x = torch.randn(1, 256, device=device).bfloat16()
    weight = torch.randn(64, 256, device=device)
    int8 = quant.quantize(weight, group_size=256)
    fp6 = quant.FPQuantizer("e3m2", group_size=256).quantize(weight)
    wide, offsets = weight.bfloat16()[None], torch.ones(1, dtype=torch.int32, device=device)
    fns = {
        "x + x": lambda: x + x,
        "mixed_gemm int8": lambda: inference.mixed_gemm(x, int8),
        "mixed_gemm fp6": lambda: inference.mixed_gemm(x, fp6),
        "moe_gemm": lambda: inference.moe_gemm(x, wide, offsets),
        "torch grouped_mm": lambda: functional.grouped_mm(x, wide.transpose(1, 2), offs=offsets),
    }
    return harness.host_rows(fns, device)


if __name__ == "__main__":
    sys.exit(main())
