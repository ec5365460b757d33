"""Ragged batches: the tokens of all sequences one after the other, without padding. Importing this
module is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.ragged_device_ops.functions.paged import paged_kv_copy, paged_kv_rotary

__all__ = ["paged_kv_copy", "paged_kv_rotary"]

_FUNCTIONS = "opkiln.ops.ragged_device_ops.functions"
_HOMES = {
    "paged_kv_copy": f"{_FUNCTIONS}.paged",
    "paged_kv_rotary": f"{_FUNCTIONS}.paged",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
