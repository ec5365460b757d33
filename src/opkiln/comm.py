"""Communication between ranks. Importing this module is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.shm_comm.functions import shm_all_gather as shm_all_gather
    from opkiln.ops.shm_comm.functions import shm_all_gather_into as shm_all_gather_into
    from opkiln.ops.shm_comm.functions import shm_all_reduce as shm_all_reduce
    from opkiln.ops.shm_comm.functions import shm_all_reduce_ as shm_all_reduce_
    from opkiln.ops.shm_comm.functions import shm_reduce_scatter as shm_reduce_scatter
    from opkiln.ops.shm_comm.functions import shm_reduce_scatter_into as shm_reduce_scatter_into
    from opkiln.ops.shm_comm.group import ShmGroup as ShmGroup
    from opkiln.ops.shm_comm.process_group import register_backend as register_backend

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.shm_comm.functions":
        "shm_all_gather shm_all_gather_into shm_all_reduce shm_all_reduce_ shm_reduce_scatter "
        "shm_reduce_scatter_into",
    "opkiln.ops.shm_comm.group": "ShmGroup",
    "opkiln.ops.shm_comm.process_group": "register_backend",
})  # fmt: skip
