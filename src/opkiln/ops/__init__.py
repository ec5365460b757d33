"""The catalogue: one folder per op, each with its builder, reference, kernels and front end."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


def given_by(module: str) -> Callable[[Any], ModuleType]:
    """A method of a builder that gives this module, imported when the method is called: op.py is
    on the cache-hit path, and the module imports torch."""

    def give(_: Any) -> ModuleType:
        from importlib import import_module

        return import_module(module)

    return give
