"""fp_quantizer beside torch, as a share of the copy's bandwidth.

    PYTHONPATH=src python bench/ops/fp_quantizer.py [--only WORD] [--out FILE]

On a GPU 256M elements, on the CPU 16M, in groups of 512. Torch has casts to fp8 alone: "torch" is
what its users write, group maxima, a division and a cast, eager and compiled.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import harness
import torch
from harness import Row
from torch import Tensor

import opkiln
from opkiln.ops.fp_quantizer.functions import FORMATS, Format, byte_count, group_count

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = 512
CALLS = 8  # in a turn: between the event before it and the first kernel the GPU waits for the host
_TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def main() -> None:
    options = harness.options(__doc__)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ops = opkiln.get_builder("fp_quantizer", backend=device.type).jit_load()
    on_gpu = device.type == "cuda"
    count, repeats = (1 << 28, 7) if on_gpu else (1 << 24, 3)
    bandwidth = harness.copy_bandwidth(device)
    rows: list[Row] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if on_gpu else (torch.float32,):
        x = torch.randn(count, device=device).to(dtype)
        for form in FORMATS.values():
            rows += _format(ops, x, form, GROUP, repeats, options.only)
        if dtype == torch.bfloat16:
            for group in (16, 64, 128, 2048, 8192, 65536):
                rows += _format(ops, x, FORMATS["e4m3"], group, repeats, options.only, alone=True)
            rows += _rows(ops, x, repeats, options.only)
    harness.report(rows, bandwidth, options.out, commit=options.commit)


def _format(
    ops: Any, x: Tensor, form: Format, group: int, repeats: int, only: str, *, alone: bool = False
) -> list[Row]:
    bits = (form.bits, form.mantissa_bits)
    name = str(x.dtype).removeprefix("torch.")
    whole = (x.numel(),)
    codes, scales = ops.fp_quantize(x, group, *bits)
    fns: dict[tuple[str, str], Callable[[], Any]] = {
        (f"quantize {name} to {form.name}, {group}", "opkiln"): partial(
            ops.fp_quantize, x, group, *bits
        ),
        (f"stochastic {name} to {form.name}, {group}", "opkiln"): partial(
            ops.fp_quantize, x, group, *bits, True, 1, 2
        ),
        (f"dequantize {form.name} to {name}, {group}", "opkiln"): partial(
            ops.fp_dequantize, codes, scales, whole, group, *bits, x.dtype
        ),
    }
    if form.name in _TORCH and not alone:
        there, back = _by_torch(form, group)
        narrow, scale = there(x)
        others = {"torch": (there, back)}
        if x.is_cuda and x.dtype == torch.bfloat16:  # compiling takes longer than all the rest
            others["torch compiled"] = (torch.compile(there), torch.compile(back))
        for who, (one, two) in others.items():
            fns[f"quantize {name} to {form.name}, {group}", who] = partial(one, x)
            fns[f"dequantize {form.name} to {name}, {group}", who] = partial(
                two, narrow, scale, x.dtype
            )
    chosen = {f"{work}|{who}": fn for (work, who), fn in fns.items() if only in work}
    traffic = (
        x.nbytes + byte_count(x.numel(), form.bits) + 4 * group_count(x.numel(), group)
    )  # fmt: skip
    taken = _timed(chosen, x.device, repeats)
    return [Row(*key.split("|"), traffic, ms) for key, ms in taken.items()]


def _timed(
    fns: dict[str, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[str, float]:
    """The time of one call, in milliseconds."""

    def several(fn: Callable[[], Any]) -> None:
        for _ in range(CALLS):
            fn()

    turns = {name: partial(several, fn) for name, fn in fns.items()}
    return {name: ms / CALLS for name, ms in harness.timed(turns, device, repeats).items()}


def _by_torch(form: Format, group: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.view(-1, group).float()
        scale = rows.abs().amax(1, keepdim=True) / form.largest
        return (rows / scale).to(_TORCH[form.name]), scale

    def dequantize(narrow: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return (narrow.float() * scale).to(dtype)

    return quantize, dequantize


def _rows(ops: Any, x: Tensor, repeats: int, only: str) -> list[Row]:
    """Half the rows of a matrix, in no order."""
    size = [x.numel() // 4096, 4096]
    codes, scales = ops.fp_quantize(x.view(size), GROUP, 6, 2)
    rows = torch.randperm(size[0], device=x.device)[: size[0] // 2]
    work = "dequantize half the rows of e3m2 to bfloat16"
    if only not in work:
        return []
    fn = partial(ops.fp_dequantize_rows, codes, scales, rows, size, GROUP, 6, 2, torch.bfloat16)
    taken = _timed({work: fn}, x.device, repeats)
    traffic = (x.nbytes + codes.nbytes + scales.nbytes) // 2 + rows.nbytes
    return [Row(work, "opkiln", traffic, taken[work])]


if __name__ == "__main__":
    main()
