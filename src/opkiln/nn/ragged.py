"""Ragged batches: the tokens of all sequences one after the other, without padding. Importing this
module is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.ragged_device_ops.batch import RaggedBatch, RaggedViews, Sequenced
    from opkiln.ops.ragged_device_ops.functions.gating import top_k_gating
    from opkiln.ops.ragged_device_ops.functions.paged import (
        listed_blocks,
        paged_kv_copy,
        paged_kv_rotary,
    )
    from opkiln.ops.ragged_device_ops.functions.rows import (
        logits_gather,
        moe_gather,
        moe_scatter,
        ragged_embedding,
    )

__all__ = [
    "RaggedBatch",
    "RaggedViews",
    "Sequenced",
    "listed_blocks",
    "logits_gather",
    "moe_gather",
    "moe_scatter",
    "paged_kv_copy",
    "paged_kv_rotary",
    "ragged_embedding",
    "top_k_gating",
]

_FUNCTIONS = "opkiln.ops.ragged_device_ops.functions"
_HOMES = {
    **dict.fromkeys(__all__, "opkiln.ops.ragged_device_ops.batch"),
    **dict.fromkeys(("listed_blocks", "paged_kv_copy", "paged_kv_rotary"), f"{_FUNCTIONS}.paged"),
    "top_k_gating": f"{_FUNCTIONS}.gating",
    **dict.fromkeys(
        ("logits_gather", "moe_gather", "moe_scatter", "ragged_embedding"), f"{_FUNCTIONS}.rows"
    ),
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
