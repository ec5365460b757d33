"""Ragged batches: the tokens of all sequences one after the other, without padding. Importing this
module is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.ragged_device_ops.batch import RaggedBatch as RaggedBatch
    from opkiln.ops.ragged_device_ops.batch import RaggedViews as RaggedViews
    from opkiln.ops.ragged_device_ops.batch import Sequenced as Sequenced
    from opkiln.ops.ragged_device_ops.functions.gating import top_k_gating as top_k_gating
    from opkiln.ops.ragged_device_ops.functions.paged import listed_blocks as listed_blocks
    from opkiln.ops.ragged_device_ops.functions.paged import paged_kv_copy as paged_kv_copy
    from opkiln.ops.ragged_device_ops.functions.paged import paged_kv_rotary as paged_kv_rotary
    from opkiln.ops.ragged_device_ops.functions.rows import logits_gather as logits_gather
    from opkiln.ops.ragged_device_ops.functions.rows import moe_gather as moe_gather
    from opkiln.ops.ragged_device_ops.functions.rows import moe_scatter as moe_scatter
    from opkiln.ops.ragged_device_ops.functions.rows import ragged_embedding as ragged_embedding

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.ragged_device_ops.batch": "RaggedBatch RaggedViews Sequenced",
    "opkiln.ops.ragged_device_ops.functions.gating": "top_k_gating",
    "opkiln.ops.ragged_device_ops.functions.paged": "listed_blocks paged_kv_copy paged_kv_rotary",
    "opkiln.ops.ragged_device_ops.functions.rows":
        "logits_gather moe_gather moe_scatter ragged_embedding",
})  # fmt: skip
