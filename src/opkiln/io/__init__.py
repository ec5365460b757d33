"""Memory and files. Importing this module is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.io.handle import AsyncIO as AsyncIO
    from opkiln.io.handle import FileRequest as FileRequest
    from opkiln.io.handle import Transfer as Transfer
    from opkiln.io.saving import Entry as Entry
    from opkiln.io.saving import Header as Header
    from opkiln.io.saving import Saving as Saving
    from opkiln.io.saving import load as load
    from opkiln.io.saving import read_header as read_header
    from opkiln.io.saving import save as save
    from opkiln.io.saving import save_in_background as save_in_background
    from opkiln.ops.async_io.engines import EngineState as EngineState
    from opkiln.ops.async_io.engines import engines as engines
    from opkiln.ops.gds.device import How as How
    from opkiln.ops.gds.device import device_engines as device_engines
    from opkiln.ops.pin_memory.pool import PinnedPool as PinnedPool
    from opkiln.ops.pin_memory.pool import PoolCounts as PoolCounts

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.io.handle": "AsyncIO FileRequest Transfer",
    "opkiln.io.saving": "Entry Header Saving load read_header save save_in_background",
    "opkiln.ops.async_io.engines": "EngineState engines",
    "opkiln.ops.gds.device": "How device_engines",
    "opkiln.ops.pin_memory.pool": "PinnedPool PoolCounts",
})  # fmt: skip
