"""Communication between ranks. Importing this module is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.shm_comm.functions import (
        shm_all_gather,
        shm_all_gather_into,
        shm_all_reduce,
        shm_all_reduce_,
        shm_reduce_scatter,
        shm_reduce_scatter_into,
    )
    from opkiln.ops.shm_comm.group import ShmGroup
    from opkiln.ops.shm_comm.process_group import register_backend

__all__ = [
    "ShmGroup",
    "register_backend",
    "shm_all_gather",
    "shm_all_gather_into",
    "shm_all_reduce",
    "shm_all_reduce_",
    "shm_reduce_scatter",
    "shm_reduce_scatter_into",
]

_HERE = "opkiln.ops.shm_comm"
_HOMES = {
    **dict.fromkeys(__all__, f"{_HERE}.functions"),
    "ShmGroup": f"{_HERE}.group",
    "register_backend": f"{_HERE}.process_group",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
