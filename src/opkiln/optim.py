"""Optimizers of the catalogue. Importing this module is cheap: each class is imported when used."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from opkiln.ops.cpu_adam.optimizer import CPUAdam
    from opkiln.ops.fused_adam.optimizer import FusedAdam

__all__ = ["CPUAdam", "FusedAdam"]

_HOMES = {
    "CPUAdam": "opkiln.ops.cpu_adam.optimizer",
    "FusedAdam": "opkiln.ops.fused_adam.optimizer",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
