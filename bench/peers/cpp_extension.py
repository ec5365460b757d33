"""torch.utils.cpp_extension: a one-line pybind extension."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def bring() -> None:
    """Import what a program that uses it imports."""
    import torch.utils.cpp_extension  # noqa: F401


def load() -> Any:
    """The extension module, built first where it is not."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).parent.parent / "sources" / "twice_pybind.cpp"
    directory = os.path.join(os.environ["BENCH_BUILD_DIR"], "twice_pybind")
    os.makedirs(directory, exist_ok=True)
    return load(name="twice_pybind", sources=[str(source)], build_directory=directory)


def check(module: Any) -> None:
    """It doubles."""
    import torch

    assert module.twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
