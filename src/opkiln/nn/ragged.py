"""Ragged batches: the tokens of all sequences one after the other, without padding. Importing this
module is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.ragged_device_ops.batch import RaggedBatch, RaggedViews, Sequenced
    from opkiln.ops.ragged_device_ops.functions.experts import moe_gather, moe_scatter, top_k_gating
    from opkiln.ops.ragged_device_ops.functions.paged import (
        listed_blocks,
        paged_kv_copy,
        paged_kv_rotary,
    )
    from opkiln.ops.ragged_device_ops.functions.rows import logits_gather, ragged_embedding

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
    "RaggedBatch": "opkiln.ops.ragged_device_ops.batch",
    "RaggedViews": "opkiln.ops.ragged_device_ops.batch",
    "Sequenced": "opkiln.ops.ragged_device_ops.batch",
    "listed_blocks": f"{_FUNCTIONS}.paged",
    "logits_gather": f"{_FUNCTIONS}.rows",
    "moe_gather": f"{_FUNCTIONS}.experts",
    "moe_scatter": f"{_FUNCTIONS}.experts",
    "paged_kv_copy": f"{_FUNCTIONS}.paged",
    "paged_kv_rotary": f"{_FUNCTIONS}.paged",
    "ragged_embedding": f"{_FUNCTIONS}.rows",
    "top_k_gating": f"{_FUNCTIONS}.experts",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
