"""The one-kernel CUDA op that the ``cuda_*`` peers build: its sources, and how it is checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent.parent / "sources"
NAMESPACE = "opkiln_bench"
SCHEMA = "axpb(Tensor x, float a, float b) -> Tensor"


def text(name: str) -> str:
    """A file of ``sources/``."""
    return (SOURCES / name).read_text()


def has_gpu() -> bool:
    """Whether the caller saw a GPU: then the op must run on it."""
    return os.environ["BENCH_GPU"] == "1"


def check(axpb: Callable[[Any, float, float], Any]) -> None:
    """It computes a * x + b on the current stream."""
    import torch

    x = torch.arange(100_003, dtype=torch.float32, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = axpb(x, 2.0, 0.5)
    side.synchronize()
    assert torch.equal(y, 2 * x + 0.5)


def check_op() -> None:
    """The same for the op of ``torch.ops``; without a GPU, that it has a kernel for one."""
    import torch

    name = f"{NAMESPACE}::axpb"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    if has_gpu():
        check(torch.ops.opkiln_bench.axpb)
