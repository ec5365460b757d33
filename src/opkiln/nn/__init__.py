"""Pieces of models. Importing this package is cheap: each module is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = ("inference", "random_ltd", "spatial")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
