"""The floor: torch.ops.load_library of the very file that opkiln loads, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def bring() -> None:
    """Nothing to import beyond torch."""


def library() -> Path:
    """The one library that opkiln's store holds for cpu_adam."""
    store = Path(os.environ["OPKILN_CACHE_DIR"])
    (found,) = (path for path in store.rglob("*.so") if "cpu_adam" in str(path))
    return found


_PATH = str(library())  # found before the clock starts


def load() -> Any:
    """Load the file."""
    import torch

    torch.ops.load_library(_PATH)  # type: ignore[no-untyped-call]
    return _PATH


def check(module: Any) -> None:
    """It is mapped into this process."""
    assert str(module) in Path("/proc/self/maps").read_text()
