"""Steps of the GPU optimizers beside torch's fused ones, DeepSpeed's and a plain kernel.

    PYTHONPATH=src python bench/ops/gpu_optimizers.py --out FILE --commit SHA [--deepspeed DIR]

Needs a GPU, torch and nvcc, and nothing else. The plain kernel has Adam's traffic and adds numbers.
DeepSpeed's fused Adam is measured where its sources are found, see ``deepspeed_adam.py``. A row is
the time of the kernels, the GPU kept busy until then; a ``whole step`` begins with nothing to do on
the GPU, and ends when it is done. A bar that is missed makes the exit code 1.
"""

from __future__ import annotations

import sys
from ctypes import c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed_adam
import harness
import torch
from harness import Bar, Row
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


PLAIN = "plain float4 kernel"
ONE_TENSOR, TENSORS, SMALL = (
    "512M fp32, one tensor",
    "800 tensors, 315M fp32",
    "10,000 tensors of 257 fp32",
)
WHOLE, FRESH = ", whole step", ", whole step, fresh gradients"
BARS = (
    Bar(ONE_TENSOR, "FusedAdam", PLAIN, 0.97, rates=True),
    Bar(ONE_TENSOR, "FusedAdam", "torch fused", 1.24),
    Bar(ONE_TENSOR, "FusedAdam", "DeepSpeed", 1.24),
    Bar(TENSORS, "FusedAdam", None, 0.92),
    Bar(TENSORS, f"FusedAdam{WHOLE}", f"torch fused{WHOLE}", 2.0),
    Bar(TENSORS, f"FusedAdam{WHOLE}", f"DeepSpeed{WHOLE}", 1.25),
    Bar(SMALL, "FusedAdam", f"torch fused{FRESH}", 50),
    Bar(SMALL, f"FusedAdam{FRESH}", f"torch fused{FRESH}", 5),
    Bar("512M bf16", "FusedAdam, and masters", None, 0.9),
    Bar(ONE_TENSOR, "FusedLion", None, 0.9),
    Bar(TENSORS, "FusedLion", None, 0.9),
    Bar(ONE_TENSOR, "FusedLamb", None, 0.9),
    Bar(TENSORS, "FusedLamb", None, 0.9),
)


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
    work: Work, makers: dict[str, tuple[int, Callable[[list[Tensor]], Any]]], note: str = ""
) -> list[Row]:
    """Each optimizer on parameters of its own, in turns; ``note`` is what of a step is timed."""
    params = {who: work.params() for who in makers}
    steps = {who: make(params[who]).step for who, (_, make) in makers.items()}

    def exchange(who: str) -> None:
        for param in params[who]:
            param.grad = torch.empty_like(param).copy_(param.grad)

    before = exchange if note == FRESH else None
    found = harness.measured(steps, "cuda", work.repeats, before, idle=bool(note))
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
    return Row(ONE_TENSOR, PLAIN, ONE[0] * ADAM, ms)


def torch_fused(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def with_masters(kind: Any) -> Callable[[list[Tensor]], Any]:
    return lambda params: kind(params, master_weights=True)


def deepspeed(folder: Path | None) -> dict[str, tuple[int, Callable[[list[Tensor]], Any]]]:
    """Its optimizer, or nothing where it cannot be built, with the reason on stderr."""
    try:
        module = deepspeed_adam.built(folder)
    except (ImportError, RuntimeError) as error:
        print(f"no DeepSpeed here: {error}", file=sys.stderr)
        return {}
    return {"DeepSpeed": (ADAM, partial(deepspeed_adam.DeepSpeedAdam, module))}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--deepspeed", metavar="DIR", type=Path, help="that has its csrc")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use", file=sys.stderr)
        return 1
    one, mixed, many = (
        Work(ONE_TENSOR, ONE),
        Work(TENSORS, MIXED),
        Work(SMALL, MANY),
    )
    narrow = Work("512M bf16", ONE, BF16)
    adams = {
        "FusedAdam": (ADAM, FusedAdam),
        "torch fused": (ADAM, torch_fused),
        **deepspeed(options.deepspeed),
    }
    parts: list[Callable[[], list[Row]]] = [
        lambda: [plain_row()],
        lambda: rows_of(one, adams),
        lambda: rows_of(one, adams, WHOLE),
        lambda: rows_of(mixed, adams),
        lambda: rows_of(mixed, adams, WHOLE),
        lambda: rows_of(many, adams, FRESH),
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
    return 1 if harness.missed(BARS, rows, bandwidth) else 0


if __name__ == "__main__":
    sys.exit(main())
