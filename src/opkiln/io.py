"""Memory and files. Importing this module is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.pin_memory.pool import PinnedPool, PoolCounts

__all__ = ["PinnedPool", "PoolCounts"]

_HOMES = {
    "PinnedPool": "opkiln.ops.pin_memory.pool",
    "PoolCounts": "opkiln.ops.pin_memory.pool",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
