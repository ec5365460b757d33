"""The floor: torch.ops.load_library of the very file that ``cuda_opkiln_builder`` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers import cuda_opkiln_builder


def bring() -> None:
    """Nothing to import beyond torch."""


_PATH = cuda_opkiln_builder.note_of_library().read_text()  # before the clock starts


def load() -> Any:
    """Load the file."""
    import torch

    torch.ops.load_library(_PATH)  # type: ignore[no-untyped-call]
    return _PATH


def check(module: Any) -> None:
    """It is mapped into this process."""
    assert str(module) in Path("/proc/self/maps").read_text()
