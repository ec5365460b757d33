"""The functions of ``stable``."""

from __future__ import annotations

import torch
from torch import Tensor

from .op import kit

calls: list[str] = []  # of the references here, so that a test sees who was called


@kit.op(gradient=False)
def who(x: Tensor) -> int:
    """0, and 1 of the native kernel."""
    return 0


@kit.op(gradient=False)
def axpy(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    calls.append("axpy")
    return alpha * x + y


@axpy.fake
def _(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return torch.empty_like(x)


@kit.op(mutates="x")
def scale_(x: Tensor, by: float) -> None:
    calls.append("scale_")
    x.mul_(by)
