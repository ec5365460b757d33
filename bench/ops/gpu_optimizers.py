"""Steps of the GPU optimizers beside torch's fused ones and a plain kernel with Adam's traffic.

    PYTHONPATH=src python bench/ops/gpu_optimizers.py --out FILE --commit SHA

Needs a GPU, torch and nvcc, and nothing else.
"""

from __future__ import annotations

import sys
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
import torch
from harness import Row
from torch import Tensor

import opkiln
from opkiln.optim import FusedAdam, FusedLamb, FusedLion

if TYPE_CHECKING:
    from collections.abc import Callable

F32, BF16 = torch.float32, torch.bfloat16
ONE = [512 * 2**20]
# As in a transformer: few large ones, many small, most of no round size.
WIDTHS = (1024 * 1024, 1024, 1_455_000, 4096, 65_537, 300_001, 147_000, 129_000)
MIXED = [width for width in WIDTHS for _ in range(100)]
MANY = [257] * 10_000

# The bytes that a step reads and writes per element.
ADAM = 28
ADAM_BF16 = 22
ADAM_BF16_STATES = 14
ADAM_MASTER = 28
LION = 20
LAMB = 40  # Adam's, and parameter and averages once more for the norms


class Work:
    """Parameters with gradients, and others of the same kind to take turns with them."""

    def __init__(self, name: str, sizes: list[int], dtype: torch.dtype = F32) -> None:
        self.name, self.sizes, self.elements = name, sizes, sum(sizes)
        self.dtype = dtype
        self.repeats = 10 if len(sizes) > 1000 else 20

    def params(self) -> list[Tensor]:
        params = [torch.randn(n, device="cuda", dtype=self.dtype) for n in self.sizes]
        for param in params:
            param.requires_grad_()
            param.grad = torch.randn_like(param)
        return params


def rows_of(
    work: Work, makers: dict[str, tuple[int, Callable[[list[Tensor]], Any]]], fresh: bool = False
) -> list[Row]:
    """Each optimizer on parameters of its own, in turns; ``fresh``: with new gradients each."""
    params = {who: work.params() for who in makers}
    steps = {who: make(params[who]).step for who, (_, make) in makers.items()}

    def exchange(who: str) -> None:
        for param in params[who]:
            param.grad = torch.empty_like(param).copy_(param.grad)

    before = exchange if fresh else None
    found = harness.measured(steps, "cuda", work.repeats, before, idle=fresh)
    note = ", whole step, fresh gradients" if fresh else ""
    return [
        Row(work.name, f"{who}{note}", work.elements * makers[who][0], time.ms, time.host_ms)
        for who, time in found.items()
    ]


def plain_row() -> Row:
    library = opkiln.load(
        "plain_traffic",
        [str(Path(__file__).with_name("plain_traffic.cu"))],
        is_python_module=False,
        abi="none",
    )
    tensors = [torch.randn(ONE[0], device="cuda") for _ in range(4)]
    pointers = [c_void_p(tensor.data_ptr()) for tensor in tensors]

    def run() -> None:
        if error := library.plain_traffic(*pointers, c_int64(ONE[0])):
            raise RuntimeError(f"CUDA's error {error}")

    ms = harness.timed({"plain": run}, "cuda", 20)["plain"]
    return Row("512M fp32, one tensor", "plain float4 kernel", ONE[0] * ADAM, ms)


def torch_fused(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def with_masters(kind: Any) -> Callable[[list[Tensor]], Any]:
    return lambda params: kind(params, master_weights=True)


def main() -> int:
    options = harness.options(__doc__)
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use", file=sys.stderr)
        return 1
    one, mixed, many = (
        Work("512M fp32, one tensor", ONE),
        Work("800 tensors, 315M fp32", MIXED),
        Work("10,000 tensors of 257 fp32", MANY),
    )
    narrow = Work("512M bf16", ONE, BF16)
    both = {"FusedAdam": (ADAM, FusedAdam), "torch fused": (ADAM, torch_fused)}
    parts: list[Callable[[], list[Row]]] = [
        lambda: [plain_row()],
        lambda: rows_of(one, both),
        lambda: rows_of(mixed, both),
        lambda: rows_of(many, both, fresh=True),
        lambda: rows_of(many, {"FusedAdam": (ADAM, FusedAdam)}),
        lambda: rows_of(
            narrow,
            {
                "FusedAdam, fp32 states": (ADAM_BF16, FusedAdam),
                "FusedAdam, and masters": (ADAM_MASTER, with_masters(FusedAdam)),
                "torch fused, bf16 states": (ADAM_BF16_STATES, torch_fused),
            },
        ),
        lambda: rows_of(one, {"FusedLion": (LION, FusedLion)}),
        lambda: rows_of(mixed, {"FusedLion": (LION, FusedLion)}),
        lambda: rows_of(one, {"FusedLamb": (LAMB, FusedLamb)}),
        lambda: rows_of(mixed, {"FusedLamb": (LAMB, FusedLamb)}),
        lambda: rows_of(many, {"FusedLion": (LION, FusedLion), "FusedLamb": (LAMB, FusedLamb)}),
    ]
    bandwidth = harness.copy_bandwidth("cuda")
    torch.cuda.empty_cache()
    rows: list[Row] = []
    for part in parts:
        for row in part():
            if options.only in f"{row.work} {row.who}":
                rows.append(row)
        torch.cuda.empty_cache()
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
