"""Rotary embedding, softmax and int8 linear layers beside torch, as shares of the copy's bandwidth.

    PYTHONPATH=src python bench/ops/rotary_softmax_linear.py [--only WORD] [--out FILE]

Each call finds other tensors than the last one, of 256 MB and more together, so that no cache
helps. The bytes are the least that must be read and written; of a linear layer they are those of
the int8 weights. On the CPU the sizes are tiny, to try the script.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Bar, Row
from torch import Tensor
from torch.nn import functional

from opkiln.nn import inference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROTATED = 256 << 20  # bytes of tensors that take turns, at least
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEAST = 0.93  # of the copy


class Work(NamedTuple):
    """``fns`` take one of the tensors that ``make`` gives. ``bars`` are the rows that are bound to
    the copy's bandwidth."""

    name: str
    bytes: int
    make: Callable[[], Any]
    fns: dict[str, Callable[[Any], Any]]
    bars: tuple[Bar, ...] = ()


def main() -> int:
    options = harness.options(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = harness.copy_bandwidth(device)
    rows: list[Row] = []
    bars: list[Bar] = []
    for work in works(device):
        if options.only in work.name:
            rows += measured(work, device)
            bars += work.bars
    rows += host_rows(device)
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    return 1 if harness.missed(bars, rows, bandwidth) else 0


def works(device: torch.device) -> list[Work]:
    gpu = device.type == "cuda"
    found = []
    for name, dtype in DTYPES.items():
        empty = partial(torch.empty, dtype=dtype, device=device)
        found += [
            rotary(name, empty, (8, 4096, 32, 128) if gpu else (1, 8, 4, 128)),
            rotary(name, empty, (1, 64, 32, 128)),
            softmax(name, empty, (131_072, 1024) if gpu else (16, 1024)),
            softmax(name, empty, (64, 4096)),
            softmax(name, empty, (4096, 32_768) if gpu else (2, 32_768)),
            masked(name, empty, (16, 32, 256, 1024) if gpu else (1, 2, 4, 1024)),
        ]
    shapes = ((4096, 4096), (14_336, 4096)) if gpu else ((64, 256),)
    for shape, count in itertools.product(shapes, (1, 4, 8, 32)):
        found.append(linear(device, shape, count))
    return found


def filled(empty: Callable[..., Tensor], shape: Sequence[int]) -> Callable[[], Tensor]:
    return lambda: empty(shape).normal_()


def rotary(name: str, empty: Callable[..., Tensor], shape: tuple[int, ...]) -> Work:
    tokens, size = shape[1], shape[-1]
    work = f"rotary {' x '.join(map(str, shape))} {name}"
    make = filled(empty, shape)
    positions = torch.arange(tokens, device=make().device, dtype=torch.int32)
    angle = positions[:, None] * 10000.0 ** (
        -torch.arange(size // 2, device=positions.device) * 2 / size
    )
    cos, sin = angle.cos(), angle.sin()

    def plain(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    fns = {
        "opkiln": lambda x: inference.rotary(x, positions),
        "opkiln, tables": lambda x: inference.rotary(x, positions, cos, sin),
        "opkiln, interleaved": lambda x: inference.rotary(x, positions, interleaved=True),
        "opkiln, in place": lambda x: inference.rotary_(x, positions),
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    numel = torch.Size(shape).numel()
    ours = ("opkiln", "opkiln, tables", "opkiln, interleaved", "opkiln, in place")
    bars = [Bar(work, each, "torch.compile", 0.97) for each in ours]
    if numel > 1 << 22:
        bars += [Bar(work, each, None, LEAST) for each in ours]
    return Work(work, 4 * numel, make, fns, tuple(bars))


def softmax(name: str, empty: Callable[..., Tensor], shape: tuple[int, ...]) -> Work:
    work = f"softmax {' x '.join(map(str, shape))} {name}"

    def plain(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    fns = {
        "opkiln": inference.softmax,
        "opkiln, in place": inference.softmax_,
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    numel = torch.Size(shape).numel()
    bars = [Bar(work, "opkiln", "torch.compile", 0.97)]
    if numel > 1 << 22:
        bars.append(Bar(work, "opkiln", None, LEAST))
    return Work(work, 4 * numel, filled(empty, shape), fns, tuple(bars))


def masked(name: str, empty: Callable[..., Tensor], shape: tuple[int, ...]) -> Work:
    work = f"softmax {' x '.join(map(str, shape))} {name}, mask and scale"
    mask = empty((shape[0], 1, 1, shape[-1])).normal_()

    def plain(x: Tensor) -> Tensor:
        return torch.softmax(x.float() * 0.125 + mask.float(), -1).to(x.dtype)

    fns = {
        "opkiln": lambda x: inference.softmax(x, mask, scale=0.125),
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    bars = (Bar(work, "opkiln", None, LEAST), Bar(work, "opkiln", "torch.compile", 0.97))
    return Work(work, 4 * torch.Size(shape).numel(), filled(empty, shape), fns, bars)


def linear(device: torch.device, shape: tuple[int, int], rows: int) -> Work:
    """Weights take turns; x is small and stays in the cache."""
    outputs, inputs = shape
    work = f"int8 linear {outputs} x {inputs}, {rows} rows bf16"
    x = torch.randn(rows, inputs, device=device).bfloat16()
    scales = torch.rand(outputs * inputs // 128, device=device)
    wide = torch.randn(shape, device=device).bfloat16()

    def make() -> Tensor:
        return torch.randint(-128, 128, shape, device=device, dtype=torch.int8)

    def dequantized(weight: Tensor) -> Tensor:
        return functional.linear(x, inference.dequantize_int8(weight, scales, torch.bfloat16))

    fns = {
        "opkiln": lambda weight: inference.int8_linear(x, weight, scales),
        "dequantized, then torch": dequantized,
        "torch, bf16 weights in the cache or not": lambda _: functional.linear(x, wide),
    }
    bars = (Bar(work, "opkiln", None, 0.8 if rows < 8 else 0.4),)
    return Work(work, outputs * inputs, make, fns, bars)


def measured(work: Work, device: torch.device) -> list[Row]:
    gpu = device.type == "cuda"
    count = -(-ROTATED // work.bytes) if gpu else 2
    calls = max(1, min(16, count))
    tensors = [work.make() for _ in range(min(count, 64))]
    turns = {name: [partial(fn, each) for each in tensors] for name, fn in work.fns.items()}
    taken = harness.rotated(turns, calls, device, 20 if gpu else 1)
    return [Row(work.name, name, work.bytes, *time) for name, time in taken.items()]


def host_rows(device: torch.device) -> list[Row]:
    """The host's time for a call with little to do, beside that of an eager ``x + x``."""
    x = torch.randn(1, 8, 4, 64, device=device).bfloat16()
    positions = torch.arange(8, device=device)
    weight = torch.ones(64, 64, device=device, dtype=torch.int8)
    scales = torch.ones(64, device=device)
    fns = {
        "x + x": lambda: x + x,
        "rotary": lambda: inference.rotary(x, positions),
        "rotary_qk_": lambda: inference.rotary_qk_(x, x, positions),
        "softmax": lambda: inference.softmax(x),
        "int8_linear": lambda: inference.int8_linear(x[0, 0], weight, scales),
    }
    return harness.host_rows(fns, device)


if __name__ == "__main__":
    sys.exit(main())
