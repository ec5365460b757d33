"""opkiln: the CUDA op by the decorator, kernel and binding in one file."""

from typing import Any

import torch

from peers import axpb as shared


def bring() -> None:
    """Import what a program that uses opkiln imports."""
    from opkiln import op  # noqa: F401


def axpb(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    """The reference."""
    return a * x + b


def load() -> Any:
    """The op, its library built first where it is not."""
    import opkiln

    source = {"cuda": shared.text("axpb_light.cu")}
    op = opkiln.op(source=source, namespace=shared.NAMESPACE)(axpb)
    op.load("cuda")
    return op


def check(module: Any) -> None:
    """It is the op."""
    assert module
    shared.check_op()
