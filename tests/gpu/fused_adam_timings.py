"""How long a step of FusedAdam takes beside torch's fused AdamW; run by fused_adam.py."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opkiln.optim import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Callable

F32, BF16 = torch.float32, torch.bfloat16


def milliseconds(step: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(between two events around a step, the host's share of it): medians."""
    for _ in range(3):
        step()
    device, host = [], []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter()
        step()
        host.append((time.perf_counter() - began) * 1e3)
        end.record()
        end.synchronize()
        device.append(start.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def work(kind: str) -> tuple[list[Tensor], int]:
    """(parameters with gradients, repeats)."""
    if kind == "800 tensors, 315M fp32":  # as in a transformer: few large ones, many small
        widths = (1024 * 1024, 1024, 1_455_000, 4096, 65_537, 300_001, 147_000, 129_000)
        sizes, dtype = [width for width in widths for _ in range(100)], F32
    elif kind == "10,000 tensors of 257 fp32":
        sizes, dtype = [257] * 10_000, F32
    else:
        sizes, dtype = [512 * 2**20], BF16 if "bf16" in kind else F32
    params = [torch.randn(n, device="cuda", dtype=dtype).requires_grad_() for n in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params, 10 if len(sizes) > 1000 else 20


def timings() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(
        what: str, who: str, elements: int, bytes_each: int, found: tuple[float, float]
    ) -> None:
        row = {
            "work": what, "who": who, "elements": elements, "ms": round(found[0], 4),
            "host_ms": round(found[1], 4),
            "gb_per_s": round(elements * bytes_each / found[0] / 1e6),
        }  # fmt: skip
        rows.append(row)
        print(f"TIME {what:30} {who:22} {row['ms']:9.4f} ms {row['gb_per_s']:6} GB/s "
              f"host {row['host_ms']:8.4f} ms", flush=True)  # fmt: skip

    add("copy, 512M fp32", "torch", 512 * 2**20, 8, milliseconds(copying(512 * 2**20), 20))
    cases: list[tuple[str, str, int, Callable[[Any], Any]]] = [
        ("512M fp32, one tensor", "FusedAdam", 28, FusedAdam),
        ("512M fp32, one tensor", "torch fused", 28, torch_fused),
        ("800 tensors, 315M fp32", "FusedAdam", 28, FusedAdam),
        ("800 tensors, 315M fp32", "torch fused", 28, torch_fused),
        ("10,000 tensors of 257 fp32", "FusedAdam", 28, FusedAdam),
        ("10,000 tensors of 257 fp32", "torch fused", 28, torch_fused),
        ("512M bf16, fp32 states", "FusedAdam", 22, FusedAdam),
        ("512M bf16, fp32 states", "FusedAdam, masters", 28, with_masters),
        ("512M bf16, bf16 states", "torch fused", 14, torch_fused),
    ]
    for what, who, bytes_each, make in cases:
        params, repeats = work(what)
        optimizer = make(params)
        elements = sum(param.numel() for param in params)
        add(what, who, elements, bytes_each, milliseconds(optimizer.step, repeats))
        del params, optimizer
        torch.cuda.empty_cache()
    return rows


def copying(elements: int) -> Callable[[], Any]:
    source, target = (torch.empty(elements, device="cuda") for _ in range(2))
    return lambda: target.copy_(source)


def torch_fused(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def with_masters(params: list[Tensor]) -> FusedAdam:
    return FusedAdam(params, master_weights=True)
