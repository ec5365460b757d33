"""opkiln: its bundled cpu_adam, from the store or built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def bring() -> None:
    """Import what a program that uses opkiln imports.

    The name is taken, not only the package: opkiln's names are resolved when they are used, and
    what that imports is import time too, as it is for the others.
    """
    from opkiln import get_builder  # noqa: F401


def load() -> Any:
    """What ``load()`` of the bundled op gives."""
    import opkiln

    return opkiln.get_builder("cpu_adam").load()


def check(module: Any) -> None:
    """The library is mapped into this process; its path is left for the floor to load."""
    assert any(not name.startswith("_") for name in dir(module)), module
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in maps if line.endswith("/cpu_adam.so")}
    (path,) = mapped
    note_of_library().write_text(path)


def note_of_library() -> Path:
    """The file that holds the path of the library that was loaded last."""
    return Path(os.environ["BENCH_BUILD_DIR"]) / "cpu_adam.path"
