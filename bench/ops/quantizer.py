"""quantizer and packbits beside torch eager and DeepSpeed, as fractions of the copy's bandwidth.

    PYTHONPATH=src python bench/ops/quantizer.py [--out FILE] [--only WORD] [--deepspeed DIR]

On a GPU 268M elements, on the CPU 16M. Bytes are those of the elements, their levels and scales. A
turn is ten calls on a GPU, so that all but the first are enqueued while it is at work: the time is
the GPU's. Torch eager is the reference, the same arithmetic a tensor at a time. DeepSpeed's kernels
are measured where their sources are found, see ``deepspeed_quantizer.py``. The plain kernel reads
and writes as much as dequantizing does, and does nothing else.
"""

from __future__ import annotations

import sys
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import deepspeed_quantizer
import torch
from harness import Row, copy_bandwidth, parser, report, timed
from torch import Tensor

import opkiln
from opkiln import quant
from opkiln.ops.packbits import functions as signs
from opkiln.ops.quantizer import functions

if TYPE_CHECKING:
    from collections.abc import Callable

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
RANKS = 8
CALLS = 10


class Case(NamedTuple):
    bits: int
    dtype: torch.dtype = F16
    group_size: int = 2048
    symmetric: bool = True
    stochastic: bool = False

    def __str__(self) -> str:
        kind = "" if self.symmetric else " asymmetric"
        kind += " stochastic" if self.stochastic else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"int{self.bits}{kind}, {dtype}, groups of {self.group_size}"


CASES = [
    Case(8), Case(4), Case(8, stochastic=True), Case(4, stochastic=True), Case(8, symmetric=False),
    Case(4, symmetric=False), Case(8, symmetric=False, stochastic=True),
    Case(4, symmetric=False, stochastic=True), Case(8, BF16), Case(4, BF16), Case(8, F32),
    Case(4, F32), Case(8, F32, stochastic=True), Case(4, F32, stochastic=True),
    Case(8, group_size=64), Case(4, group_size=64), Case(8, group_size=96), Case(4, group_size=96),
    Case(8, group_size=512), Case(8, group_size=65536), Case(4, group_size=65536),
    Case(8, F32, 65536), Case(8, group_size=65536, stochastic=True),
    Case(4, group_size=65536, stochastic=True),
]  # fmt: skip


def repeat(fn: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        fn()


def per_call(
    fns: dict[str, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[str, float]:
    """The milliseconds of one call."""
    if device.type != "cuda":
        return timed(fns, device, repeats)

    def many(fn: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: repeat(fn)

    turns = timed({name: many(fn) for name, fn in fns.items()}, device, repeats)
    return {name: ms / CALLS for name, ms in turns.items()}


def eager(x: Tensor, case: Case) -> Callable[[], Any]:
    rest = (case.bits, case.group_size, case.symmetric, case.stochastic, 1, 2, 1, 1, 1)
    return lambda: functions.quantize.reference(x, *rest)


def rows_of(case: Case, x: Tensor, repeats: int, beside: bool, rival: Any) -> list[Row]:
    rest = {
        "bits": case.bits, "group_size": case.group_size, "symmetric": case.symmetric,
        "stochastic": case.stochastic, "seed": 1, "offset": 2,
    }  # fmt: skip
    q = quant.quantize(x, **rest)
    moved = x.nbytes + q.nbytes
    fns: dict[str, Callable[[], Any]] = {"quantize": lambda: quant.quantize(x, **rest)}
    if not case.stochastic:
        fns["dequantize"] = lambda: quant.dequantize(q)
    if case == Case(8):
        fns["fake_quantize"] = lambda: quant.fake_quantize(x, **rest)
    if rival is not None and case in (Case(8), Case(4)):
        theirs = deepspeed_quantizer.DeepSpeedQuantizer(rival, case.bits, case.group_size)
        made = theirs.quantize(x)
        fns["quantize|DeepSpeed"] = lambda: theirs.quantize(x)
        fns["dequantize|DeepSpeed"] = lambda: theirs.dequantize(*made)
    found = per_call(fns, x.device, repeats)
    rows = []
    for name, ms in found.items():
        work, _, who = name.partition("|")
        size = 2 * x.nbytes if work == "fake_quantize" else moved
        rows.append(Row(f"{work} {case}", who or "opkiln", size, ms))
    if beside:
        part = x[: x.numel() // 8]  # the reference holds many tensors of fp32 and int64 at once
        ms = timed({"eager": eager(part, case)}, x.device, 3)["eager"]
        rows.append(Row(f"quantize {case}", "torch eager", moved // 8, ms))
    return rows


def plain_rows(repeats: int) -> list[Row]:
    """What the GPU's memory gives where far more is written than read."""
    library = opkiln.load(
        "plain_widening",
        [str(Path(__file__).with_name("plain_widening.cu"))],
        is_python_module=False,
        abi="none",
    )
    count = 2**26
    narrow = torch.randint(256, (8 * count,), dtype=torch.uint8, device="cuda")
    wide = torch.empty(16 * count, dtype=torch.uint8, device="cuda")
    pointers = [c_void_p(each.data_ptr()) for each in (narrow, wide)]

    def run(size: int) -> None:
        if error := library.plain_widening(*pointers, c_int64(count), c_int(size)):
            raise RuntimeError(f"CUDA's error {error}")

    fns = {str(size): lambda size=size: run(size) for size in (8, 4, 2)}
    return [
        Row(f"{size} bytes read, 16 written", "plain kernel", (16 + int(size)) * count, ms)
        for size, ms in per_call(fns, torch.device("cuda"), repeats).items()
    ]


def deepspeed(folder: Path | None) -> Any:
    """Its kernels, or None where they cannot be built, with the reason on stderr."""
    try:
        return deepspeed_quantizer.built(folder)
    except (ImportError, RuntimeError) as error:
        print(f"no DeepSpeed here: {error}", file=sys.stderr)
        return None


def reductions(x: Tensor, repeats: int) -> list[Row]:
    rows = []
    part = x[: x.numel() // RANKS]
    error = torch.zeros(part.numel(), device=x.device)
    for bits in (8, 4):
        parts = [quant.quantize(part, bits=bits) for _ in range(RANKS)]
        moved = (RANKS + 1) * parts[0].nbytes
        for name, given in (("", None), (" with feedback", error)):
            fns = {"": lambda p=parts, e=given: quant.quantized_reduce(p, error=e)}
            size = moved + (0 if given is None else 2 * error.nbytes)
            work = f"quantized_reduce int{bits}, {RANKS} parts{name}"
            rows.append(Row(work, "opkiln", size, per_call(fns, x.device, repeats)[""]))
    return rows


def packing(x: Tensor, repeats: int) -> list[Row]:
    packed = quant.packbits(x)
    dtype = str(x.dtype).removeprefix("torch.")
    fns: dict[str, Callable[[], Any]] = {
        f"packbits {dtype}": lambda: quant.packbits(x),
        f"unpackbits {dtype}": lambda: quant.unpackbits(packed, x.shape, dtype=x.dtype),
    }
    moved = x.nbytes + packed.nbytes
    rows = [Row(name, "opkiln", moved, ms) for name, ms in per_call(fns, x.device, repeats).items()]
    part = x[: x.numel() // 8]
    ms = timed({"eager": lambda: signs.packbits.reference(part)}, x.device, 3)["eager"]
    return [*rows, Row(f"packbits {dtype}", "torch eager", moved // 8, ms)]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--deepspeed", metavar="DIR", type=Path, help="that has its csrc")
    asked = made.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    count, repeats = (2**28, 20) if gpu else (2**24, 7)
    bandwidth = copy_bandwidth(device)
    rival = deepspeed(asked.deepspeed) if gpu else None
    rows: list[Row] = []
    tensors = {dtype: torch.randn(count, device=device).to(dtype) for dtype in (F32, F16, BF16)}
    for case in CASES:
        if asked.only in str(case):
            beside = case in (Case(8), Case(4), Case(8, stochastic=True))
            rows += rows_of(case, tensors[case.dtype], repeats, beside, rival)
    if gpu and asked.only in "plain kernel":
        rows += plain_rows(repeats)
    if asked.only in "quantized_reduce":
        rows += reductions(tensors[F16], repeats)
    if asked.only in "packbits":
        rows += packing(tensors[F32], repeats) + packing(tensors[F16], repeats)
    report(rows, bandwidth, asked.out, commit=asked.commit)


if __name__ == "__main__":
    main()
