"""Optimizers of the catalogue. Importing this module is cheap: each class is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.cpu_adagrad.optimizer import CPUAdagrad as CPUAdagrad
    from opkiln.ops.cpu_adam.optimizer import CPUAdam as CPUAdam
    from opkiln.ops.cpu_lion.optimizer import CPULion as CPULion
    from opkiln.ops.fused_adam.optimizer import FusedAdam as FusedAdam
    from opkiln.ops.fused_lamb.optimizer import FusedLamb as FusedLamb
    from opkiln.ops.fused_lion.optimizer import FusedLion as FusedLion

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.cpu_adagrad.optimizer": "CPUAdagrad",
    "opkiln.ops.cpu_adam.optimizer": "CPUAdam",
    "opkiln.ops.cpu_lion.optimizer": "CPULion",
    "opkiln.ops.fused_adam.optimizer": "FusedAdam",
    "opkiln.ops.fused_lamb.optimizer": "FusedLamb",
    "opkiln.ops.fused_lion.optimizer": "FusedLion",
})  # fmt: skip
