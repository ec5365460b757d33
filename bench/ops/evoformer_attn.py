"""Evoformer attention beside eager PyTorch, torch.compile and torch's attention: time and memory.

    PYTHONPATH=src python bench/ops/evoformer_attn.py [--only WORD] [--out FILE]

Both biases have gradients in "forward+backward". torch's attention is given their sum as a mask.
The bytes are those of the five tensors and the result (and, with backward, of their gradients).
"peak" rows are the most memory that a step takes beyond its arguments and results, in MiB, printed
as milliseconds are; they have no bars. On the CPU the sizes are tiny, to try the script.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Bar, Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from opkiln.nn import evoformer_attention

if TYPE_CHECKING:
    from collections.abc import Callable

ROTATED = 256 << 20  # bytes of arguments that take turns, at least
FORWARD, STEP = "forward", "forward+backward"
BARS = {FORWARD: 2.5, STEP: 1.7}
LENGTHS = (256, 512, 1024, 2048)


class Shape(NamedTuple):
    rows: int
    length: int
    heads: int
    head: int

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.length} x {self.heads} x {self.head}"


def main() -> int:
    options = harness.options(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    shapes = [Shape(256, 256, 4, 32), Shape(512, 384, 8, 32)] if gpu else [Shape(2, 24, 2, 8)]
    bandwidth = harness.copy_bandwidth(device)
    rows: list[Row] = []
    bars: list[Bar] = []
    for dtype, shape, kind in itertools.product(
        (torch.bfloat16, torch.float16), shapes, (FORWARD, STEP)
    ):
        work = f"{shape.name}, {str(dtype).removeprefix('torch.')}, {kind}"
        if options.only in work:
            found = measured(work, shape, dtype, kind, device, 15 if gpu else 1)
            rows += found
            bars += bars_of(work, kind, found)
    rows += host_rows(device, shapes[0])
    memory = peaks(device) if gpu and options.only in "peak" else {}
    harness.report(rows, bandwidth, options.out, commit=options.commit, more={"peak_mib": memory})
    for name, by_length in memory.items():
        print(f"peak beyond arguments and results, {name}: {by_length} MiB")
    return 1 if harness.missed(bars, rows, bandwidth) else 0


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair: Tensor) -> Tensor:
    """As models write it."""
    scores = torch.einsum("bnqhd,bnkhd->bnhqk", q * q.shape[-1] ** -0.5, k)
    weights = (scores + mask + pair).softmax(-1)
    return torch.einsum("bnhqk,bnkhd->bnqhd", weights, v)


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, pair: Tensor) -> Tensor:
    heads_first = (each.transpose(2, 3).flatten(0, 1) for each in (q, k, v))
    bias = (mask + pair).flatten(0, 1)
    out = scaled_dot_product_attention(*heads_first, attn_mask=bias)
    return out.unflatten(0, q.shape[:2]).transpose(2, 3)


def ways() -> dict[str, Callable[..., Tensor]]:
    torch._dynamo.reset()  # so that each shape has code of its own
    return {
        "opkiln": evoformer_attention,
        "torch eager": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
        "torch sdpa": by_torch,
        "torch sdpa, compiled": torch.compile(by_torch, dynamic=False),
    }


class Turn:
    """A call, each time with the next arguments."""

    def __init__(self, function: Callable[..., Tensor], given: list[tuple[Tensor, ...]]) -> None:
        self._function, self._given = function, itertools.cycle(given)

    def __call__(self) -> Any:
        *arguments, grad = next(self._given)
        if not arguments[0].requires_grad:
            with torch.no_grad():
                return self._function(*arguments)
        return torch.autograd.grad(self._function(*arguments), arguments, grad)


def arguments_of(
    shape: Shape, dtype: torch.dtype, device: torch.device, kind: str
) -> tuple[Tensor, ...]:
    rows, length, heads, head = shape

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=device).to(dtype).requires_grad_(kind == STEP)

    q, k, v = (random(1, rows, length, heads, head) for _ in range(3))
    mask, pair = random(1, rows, 1, 1, length), random(1, 1, heads, length, length)
    return q, k, v, mask, pair, torch.randn_like(q).detach()


def measured(
    work: str, shape: Shape, dtype: torch.dtype, kind: str, device: torch.device, repeats: int
) -> list[Row]:
    first = arguments_of(shape, dtype, device, kind)
    size = sum(each.nbytes for each in first)
    count = -(-ROTATED // size) if device.type == "cuda" else 1
    given = [first, *(arguments_of(shape, dtype, device, kind) for _ in range(count - 1))]
    fns = {name: Turn(function, given) for name, function in ways().items()}
    for fn in fns.values():
        fn()  # compiles
    taken = harness.measured(fns, device, repeats)
    moved = size * (2 if kind == STEP else 1)
    return [Row(work, name, moved, time.ms, time.host_ms) for name, time in taken.items()]


def bars_of(work: str, kind: str, rows: list[Row]) -> list[Bar]:
    best = min((row for row in rows if row.who != "opkiln"), key=lambda row: row.ms)
    return [Bar(work, "opkiln", best.who, BARS[kind])]


def peaks(device: torch.device) -> dict[str, dict[int, float]]:
    """MiB by the length, of a step with 64 rows of 4 heads of 32."""
    found: dict[str, dict[int, float]] = {}
    for name, function in (("opkiln", evoformer_attention), ("torch sdpa", by_torch)):
        for length in LENGTHS:
            given = [arguments_of(Shape(64, length, 4, 32), torch.bfloat16, device, STEP)]
            turn = Turn(function, given)
            turn()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            turn()
            results = sum(each.nbytes for each in given[0])  # the gradients, and the output
            peak = torch.cuda.max_memory_allocated() - before - results
            found.setdefault(name, {})[length] = round(peak / 2**20, 1)
            del given, turn
    return found


def host_rows(device: torch.device, shape: Shape) -> list[Row]:
    """The host's share of a small call, beside an eager addition."""
    small = arguments_of(shape._replace(rows=2, length=16), torch.bfloat16, device, FORWARD)
    fns = {
        "opkiln": Turn(evoformer_attention, [small]),
        "x + x": lambda: torch.add(small[0], small[0]),
    }
    taken = harness.measured(fns, device, 15)
    return [Row("host time of a call", n, 0, t.ms, t.host_ms) for n, t in taken.items()]


if __name__ == "__main__":
    sys.exit(main())
