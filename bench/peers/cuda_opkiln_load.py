"""opkiln: the CUDA op by one call, as with torch.utils.cpp_extension.load."""

from __future__ import annotations

from typing import Any

from peers import axpb


def bring() -> None:
    """Import what a program that uses opkiln imports."""
    from opkiln import load  # noqa: F401


def load() -> Any:
    """The path of the library, built first where it is not, and the schema that it implements."""
    import torch

    import opkiln

    schema = torch.library.Library(axpb.NAMESPACE, "FRAGMENT")
    schema.define(axpb.SCHEMA)
    path = opkiln.load(
        name="axpb",
        sources=[str(axpb.SOURCES / name) for name in ("axpb.cu", "axpb_stable.cpp")],
        is_python_module=False,
        abi="torch-stable",
    )
    return path, schema


def check(module: Any) -> None:
    """It is the op."""
    assert module
    axpb.check_op()
