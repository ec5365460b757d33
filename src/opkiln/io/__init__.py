"""Memory and files. Importing this module is cheap: each name is imported when used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.io.handle import AsyncIO, FileRequest, Transfer
    from opkiln.io.saving import (
        Entry,
        Header,
        Saving,
        load,
        read_header,
        save,
        save_in_background,
    )
    from opkiln.ops.async_io.engines import EngineState, engines
    from opkiln.ops.gds.device import How, device_engines
    from opkiln.ops.pin_memory.pool import PinnedPool, PoolCounts

__all__ = [
    "AsyncIO",
    "EngineState",
    "Entry",
    "FileRequest",
    "Header",
    "How",
    "PinnedPool",
    "PoolCounts",
    "Saving",
    "Transfer",
    "device_engines",
    "engines",
    "load",
    "read_header",
    "save",
    "save_in_background",
]

_HOMES = {
    **dict.fromkeys(__all__, "opkiln.io.saving"),
    **dict.fromkeys(("AsyncIO", "FileRequest", "Transfer"), "opkiln.io.handle"),
    **dict.fromkeys(("EngineState", "engines"), "opkiln.ops.async_io.engines"),
    **dict.fromkeys(("How", "device_engines"), "opkiln.ops.gds.device"),
    **dict.fromkeys(("PinnedPool", "PoolCounts"), "opkiln.ops.pin_memory.pool"),
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
