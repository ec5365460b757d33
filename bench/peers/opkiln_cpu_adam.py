"""opkiln: its bundled cpu_adam, from the store or built."""

from __future__ import annotations

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
    """The loaded namespace has functions."""
    assert any(not name.startswith("_") for name in dir(module)), module
