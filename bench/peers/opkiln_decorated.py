"""opkiln: a one-line op by the decorator."""

from pathlib import Path
from typing import Any

import torch


def bring() -> None:
    """Import what a program that uses opkiln imports."""
    from opkiln import op  # noqa: F401


def twice(x: torch.Tensor) -> torch.Tensor:
    """The reference."""
    return 2 * x


def load() -> Any:
    """The op. Its first call builds the library where it is not."""
    import opkiln

    source = Path(__file__).parent.parent / "sources" / "twice_light.cpp"
    return opkiln.op(source=source.read_text(), namespace="opkiln_bench")(twice)


def check(module: Any) -> None:
    """It doubles."""
    assert module(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
