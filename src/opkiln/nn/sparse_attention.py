"""Attention over listed blocks of keys, for long sequences, and the layouts that list them.
Importing this module is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.sparse_attn.attention import SparseSelfAttention, attention
    from opkiln.ops.sparse_attn.layouts import (
        BigBird,
        Blocks,
        Dense,
        Fixed,
        Layout,
        Longformer,
        SlidingWindow,
        Variable,
    )
    from opkiln.ops.sparse_attn.plans import SparsePlan

__all__ = [
    "BigBird",
    "Blocks",
    "Dense",
    "Fixed",
    "Layout",
    "Longformer",
    "SlidingWindow",
    "SparsePlan",
    "SparseSelfAttention",
    "Variable",
    "attention",
]

_HOMES = {
    **dict.fromkeys(__all__, "opkiln.ops.sparse_attn.layouts"),
    "SparsePlan": "opkiln.ops.sparse_attn.plans",
    "SparseSelfAttention": "opkiln.ops.sparse_attn.attention",
    "attention": "opkiln.ops.sparse_attn.attention",
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
