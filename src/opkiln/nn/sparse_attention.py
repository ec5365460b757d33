"""Attention over listed blocks of keys, for long sequences, and the layouts that list them.
Importing this module is cheap: each name is imported when it is used."""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.sparse_attn.attention import SparseSelfAttention as SparseSelfAttention
    from opkiln.ops.sparse_attn.attention import attention as attention
    from opkiln.ops.sparse_attn.layouts import BigBird as BigBird
    from opkiln.ops.sparse_attn.layouts import Blocks as Blocks
    from opkiln.ops.sparse_attn.layouts import Dense as Dense
    from opkiln.ops.sparse_attn.layouts import Fixed as Fixed
    from opkiln.ops.sparse_attn.layouts import Layout as Layout
    from opkiln.ops.sparse_attn.layouts import Longformer as Longformer
    from opkiln.ops.sparse_attn.layouts import SlidingWindow as SlidingWindow
    from opkiln.ops.sparse_attn.layouts import Variable as Variable
    from opkiln.ops.sparse_attn.plans import SparsePlan as SparsePlan

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.sparse_attn.attention": "SparseSelfAttention attention",
    "opkiln.ops.sparse_attn.layouts":
        "BigBird Blocks Dense Fixed Layout Longformer SlidingWindow Variable",
    "opkiln.ops.sparse_attn.plans": "SparsePlan",
})  # fmt: skip
