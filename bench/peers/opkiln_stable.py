"""opkiln: a one-line op on torch's stable ABI, from text."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def bring() -> None:
    """Import what a program that uses opkiln imports."""
    from opkiln import load_inline  # noqa: F401


def load() -> Any:
    """The path of the library, built first where it is not; its op is then in torch.ops."""
    import opkiln

    source = Path(__file__).parent.parent / "sources" / "twice_stable.cpp"
    return opkiln.load_inline(
        name="twice_stable",
        cpp_sources=source.read_text(),
        is_python_module=False,
        abi="torch-stable",
    )


def check(module: Any) -> None:
    """It doubles."""
    import torch

    assert module
    assert torch.ops.opkiln_bench.twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
