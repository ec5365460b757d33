"""Modules whose names are imported when they are used."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any


def names(
    module: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module that imports each name from its home module on
    first use. If that needs torch and there is none, the ModuleNotFoundError has a hint."""

    def getattribute(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"{module}.{name} needs torch, which is not installed\nhint: pip install torch",
                name="torch",
            ) from None
        setattr(sys.modules[module], name, value)
        return value

    def listing() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes})

    return getattribute, listing


@contextmanager
def imports() -> Iterator[None]:
    """Within the block, which imports many modules, no garbage is collected: in a process with
    torch a full collection takes longer than the imports."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
