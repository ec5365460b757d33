"""DeepSpeed's module ``sparse_attn``, and its ``SparseSelfAttention``, over opkiln's op.

A configuration gives its layout, and the op does the rest. Results equal those of DeepSpeed's
documentation: a mask of the mode ``mul`` hides keys where it is 0, and one of the mode ``add`` is
added to the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opkiln.ops.sparse_attn import attention, layouts
from opkiln.ops.sparse_attn.layouts import Layout


class SparseSelfAttention(nn.Module):
    """DeepSpeed's module of this name. ``sparsity_config`` is one of DeepSpeed's configurations, or
    any object with ``make_layout(tokens)`` and ``block``.

    ``master_layout`` is a buffer, as in DeepSpeed: it travels with the state dict, and processes
    that drew other random blocks have the same after ``load_state_dict`` or a broadcast of it.
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: Any,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self._made: tuple[tuple[int, int], Layout] | None = None

    def layout(self) -> Layout:
        """The layout of the buffer; it is made again when the buffer has changed."""
        state = (id(self.master_layout), self.master_layout._version)
        if self._made is None or self._made[0] != state:
            layout = self.master_layout
            # One layout if all heads have the same: its lists are shorter.
            if torch.equal(layout, layout[:1].expand_as(layout)):
                layout = layout[:1]
            self._made = (state, layouts.Blocks(layout, self.sparsity_config.block))
        return self._made[1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """[batch, heads, tokens, head] each. ``key`` may be transposed, as DeepSpeed takes it; this
        is recognized by its shape, so only if ``tokens`` and ``head`` differ."""
        if key.shape != query.shape and key.mT.shape == query.shape:
            key = key.mT
        inner = attention.SparseSelfAttention(
            self.layout(), self.key_padding_mask_mode, self.attn_mask_mode
        )
        out: Tensor = inner(query, key, value, rpe, key_padding_mask, attn_mask)
        return out
