"""opkiln: a one-line function without torch, from text."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def bring() -> None:
    """Import what a program that uses opkiln imports."""
    from opkiln import load_inline  # noqa: F401


def load() -> Any:
    """A ctypes.CDLL, built first where it is not."""
    import opkiln

    source = Path(__file__).parent.parent / "sources" / "twice_plain.cpp"
    return opkiln.load_inline(
        name="twice_plain", cpp_sources=source.read_text(), is_python_module=False, abi="none"
    )


def check(module: Any) -> None:
    """It doubles."""
    import ctypes

    numbers = (ctypes.c_float * 3)(1, 1, 1)
    result = (ctypes.c_float * 3)()
    module.twice(numbers, result, ctypes.c_long(3))
    assert list(result) == [2.0, 2.0, 2.0]
