"""tvm-ffi: a one-line op through its own compile-and-cache path."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def bring() -> None:
    """Import what a program that compiles with tvm-ffi imports."""
    import tvm_ffi.cpp  # noqa: F401


def load() -> Any:
    """The module, built first where it is not."""
    import tvm_ffi.cpp

    source = Path(__file__).parent.parent / "sources" / "twice_tvm.cpp"
    return tvm_ffi.cpp.load_inline(
        name="twice_tvm", cpp_sources=source.read_text(), functions="twice"
    )


def check(module: Any) -> None:
    """It doubles."""
    import torch

    result = torch.empty(3)
    module.twice(torch.ones(3), result)
    assert result.tolist() == [2.0, 2.0, 2.0]
