"""Optimizers of the catalogue. Importing this module is cheap: each class is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.cpu_adagrad.optimizer import CPUAdagrad
    from opkiln.ops.cpu_adam.optimizer import CPUAdam
    from opkiln.ops.cpu_lion.optimizer import CPULion
    from opkiln.ops.fused_adam.optimizer import FusedAdam
    from opkiln.ops.fused_lamb.optimizer import FusedLamb
    from opkiln.ops.fused_lion.optimizer import FusedLion

__all__ = ["CPUAdagrad", "CPUAdam", "CPULion", "FusedAdam", "FusedLamb", "FusedLion"]

_HOMES = {
    "CPUAdagrad": "opkiln.ops.cpu_adagrad.optimizer",
    "CPUAdam": "opkiln.ops.cpu_adam.optimizer",
    "CPULion": "opkiln.ops.cpu_lion.optimizer",
    "FusedAdam": "opkiln.ops.fused_adam.optimizer",
    "FusedLamb": "opkiln.ops.fused_lamb.optimizer",
    "FusedLion": "opkiln.ops.fused_lion.optimizer",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
