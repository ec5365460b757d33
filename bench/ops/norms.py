"""Norms, activations and residual adds beside torch and torch.compile, as a share of the copy.

    PYTHONPATH=src python bench/ops/norms.py [--only WORD] [--out FILE] [--tiny]

On a GPU 32768 x 4096, 65536 x 1024 and 64 x 4096, in bf16 and fp16, each call with other tensors,
so that no cache has them. For 64 x 4096 the host's time of a call is what counts, too, beside that
of an eager ``x + x``. On the CPU 2048 x 4096, and in fp32 1024 x 4096: glibc maps 32 MB and more
anew at each call, and the page faults take eight times as long as the work, for torch, too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Bar, Row
from torch import Tensor
from torch.nn import functional

from opkiln.nn import inference

if TYPE_CHECKING:
    from collections.abc import Callable

ROTATED = 512 << 20  # bytes of the tensors that calls take turns with
SMALL = (64, 4096)


class Work(NamedTuple):
    """``tensors`` of the rows' shape are read, and so many written; ``rows`` are of one row."""

    name: str
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    tensors: int = 1
    written: float = 1.0
    rows: int = 1


def _torch_pre_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return functional.rms_norm(total, total.shape[-1:], weight, 1e-6), total


def _torch_gated(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return functional.silu(gate) * value


WORKS = (
    Work("rms norm", inference.rms_norm, lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6)),
    Work(
        "layer norm",
        inference.layer_norm,
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b),
        rows=2,
    ),
    Work("add and rms norm", inference.pre_rms_norm, _torch_pre_rms, tensors=2, written=2),
    Work(
        "bias and gelu",
        inference.bias_gelu,
        lambda x, b: functional.gelu(x + b, approximate="tanh"),
    ),
    Work(
        "bias and gelu by erf",
        lambda x, b: inference.bias_gelu(x, b, False),
        lambda x, b: functional.gelu(x + b),
    ),
    Work("gated silu", inference.gated_silu, _torch_gated, written=0.5, rows=0),
    Work(
        "residual, attention and bias",
        lambda h, r, a, b: inference.residual_add(h, r, a, b, None, 0.5),
        lambda h, r, a, b: h + a + (r + b) * 0.5,
        tensors=3,
    ),
)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small tensors: whether it runs")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    inference.rms_norm.load(device.type)
    bandwidth = harness.copy_bandwidth(device)
    shapes = [(32768, 4096), (65536, 1024), SMALL] if on_gpu else [(2048, 4096)]
    if options.tiny:
        shapes = [(8, 256), (4, 64)]
    rows: list[Row] = []
    bars: list[Bar] = []
    dtypes = [torch.bfloat16, torch.float16, *([] if on_gpu else [torch.float32])]
    for shape, dtype, work in itertools.product(shapes, dtypes, WORKS):
        if options.only not in work.name:
            continue
        of_half = not on_gpu and dtype == torch.float32
        found, asked = _measured(
            work, (shape[0] // (1 + of_half), shape[1]), dtype, device, options.tiny
        )
        rows += found
        bars += asked
        torch.compiler.reset()
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    _tell_small(rows)
    harness.missed(bars, rows, bandwidth)


def _measured(
    work: Work, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, tiny: bool
) -> tuple[list[Row], list[Bar]]:
    on_gpu, small = device.type == "cuda", shape == SMALL
    bytes_of_one = shape[0] * shape[1] * dtype.itemsize
    sets = max(2, min(512, ROTATED // (bytes_of_one * work.tensors))) if not tiny else 2
    inputs = [
        [torch.randn(shape, device=device, dtype=dtype) for _ in range(work.tensors)]
        for _ in range(sets)
    ]
    rows = [torch.randn(shape[1], device=device, dtype=dtype) for _ in range(work.rows)]
    turns = itertools.cycle(inputs)
    calls = 1 if not on_gpu else 32 if small else 4

    def repeated(function: Callable[..., Any]) -> Callable[[], None]:
        def call() -> None:
            for _ in range(calls):
                function(*next(turns), *rows)

        return call

    fns = {"opkiln": repeated(work.ours), "torch": repeated(work.torch)}
    if on_gpu and dtype == torch.bfloat16:  # compiling takes longer than all the rest
        fns["torch compiled"] = repeated(torch.compile(work.torch, dynamic=False))
    if small:
        fns["x + x"] = repeated(lambda x, *_: x + x)
    name = f"{work.name}, {shape[0]} x {shape[1]}, {str(dtype).removeprefix('torch.')}"
    traffic = int(bytes_of_one * (work.tensors + work.written))
    with torch.no_grad():
        times = harness.measured(fns, device, 2 if tiny else 15 if on_gpu else 41)
    found = [
        Row(name, who, traffic, time.ms / calls, time.host_ms / calls)
        for who, time in times.items()
    ]
    bars = [Bar(name, "opkiln", None, 0.93 if on_gpu else 0.9)] if not small else []
    bars.append(Bar(name, "opkiln", "torch compiled" if on_gpu else "torch", 0.97))
    return found, bars


def _tell_small(rows: list[Row]) -> None:
    """The bars of 64 x 4096: time on the GPU, and the host's time of a call."""
    found = {(row.work, row.who): row for row in rows}
    for (work, who), plain in found.items():
        ours, compiled = found[work, "opkiln"], found.get((work, "torch compiled"))
        if who != "x + x" or ours.host_ms is None or plain.host_ms is None:
            continue
        most = max(0.0035, 1.1 * compiled.ms) if compiled else 0.0035
        print(
            f"{'ok      ' if ours.ms <= most else 'MISSED  '}{work}: {ours.ms * 1e3:.2f} us, "
            f"bar {most * 1e3:.2f} us"
        )
        host = ours.host_ms / plain.host_ms
        print(
            f"{'ok      ' if host <= 1.3 else 'MISSED  '}{work}: host {host:.2f} of x + x, bar 1.3"
        )


if __name__ == "__main__":
    main()
