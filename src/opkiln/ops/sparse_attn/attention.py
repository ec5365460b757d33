"""The front end of ``sparse_attn``: ``opkiln.nn.sparse_attention`` and ``SparseSelfAttention``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from opkiln.errors import ArgumentError
from opkiln.ops.checks import call_checked
from opkiln.ops.sparse_attn.functions import fitting, sparse_attn
from opkiln.ops.sparse_attn.plans import SparsePlan

if TYPE_CHECKING:
    from opkiln.ops.sparse_attn.layouts import Layout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | SparsePlan,
    *,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
) -> Tensor:
    """Attention in which each block of queries sees the blocks of keys that ``layout`` names.

    ``q``, ``k`` and ``v`` are [batch, heads, tokens, head]; so is the result. ``layout`` is one of
    the classes of ``opkiln.nn.sparse_attention``, or its plan for this number of tokens:
    ``layout.plan(tokens, device)``. ``scale`` is 1 / sqrt(head) unless given.

    ``key_padding_mask`` is [batch, tokens], ``attn_mask`` can be broadcast to [batch, heads,
    tokens, tokens]. Both are added to the scores; with the mode "mul", or if they are bool, keys
    where they are 0 are not seen. They get no gradient. A query that sees no key gives zeros.

    Kernels for fp16 and bf16 run on NVIDIA GPUs from compute capability 8.0 on, for heads of up to
    128 that are multiples of 8; kernels for fp32, fp16 and bf16 on CPUs. Nothing of tokens x tokens
    is in memory, and results and gradients are the same to the bit each time. Other calls run as
    the reference, which is dense. Raises UsageError.
    """
    if q.dim() != 4:
        raise ArgumentError(f"q has shape {list(q.shape)}, expected [batch, heads, tokens, head]")
    batch, _, tokens, head = q.shape
    plan = layout if isinstance(layout, SparsePlan) else layout.plan(tokens, q.device)
    if plan.tokens != tokens:
        raise ArgumentError(f"the plan is for {plan.tokens} tokens, q has {tokens}")
    for mode in (key_padding_mask_mode, attn_mask_mode):
        if mode not in ("add", "mul"):
            raise ArgumentError(f"the mode is {mode!r}, expected 'add' or 'mul'")
    scale = head**-0.5 if scale is None else scale
    if key_padding_mask is not None:
        key_padding_mask = _additive_mask(key_padding_mask, (batch, tokens), key_padding_mask_mode)
    if attn_mask is not None:
        attn_mask_mode = "mul" if attn_mask.dtype == torch.bool else attn_mask_mode
        attn_mask = _mask(attn_mask, q)
    return call_checked(
        sparse_attn, fitting(q), fitting(k), fitting(v), plan.seen, plan.lists, key_padding_mask,
        attn_mask, plan.block, scale, plan.causal, plan.window, attn_mask_mode == "mul",
    )[0]  # fmt: skip


class SparseSelfAttention(nn.Module):
    """``attention`` with a layout and modes of masks, called as DeepSpeed's module of this name:
    ``forward(query, key, value, rpe=None, key_padding_mask=None, attn_mask=None)``.

    ``rpe`` is added to the scores, and like the masks it gets no gradient.
    """

    def __init__(
        self, layout: Layout, key_padding_mask_mode: str = "add", attn_mask_mode: str = "mul"
    ) -> None:
        super().__init__()
        self.layout = layout
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """The attention, [batch, heads, tokens, head]. Raises UsageError."""
        mode = self.attn_mask_mode
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(query.shape[0], query.shape[2])
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = attn_mask.reshape(attn_mask.shape[-2:])
        if rpe is not None:
            if attn_mask is None:
                attn_mask = rpe
            elif mode == "mul":
                attn_mask = rpe.masked_fill(attn_mask == 0, -torch.inf)
            else:
                attn_mask = rpe + attn_mask.to(rpe.dtype)
            mode = "add"
        return attention(
            query, key, value, self.layout, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
            key_padding_mask_mode=self.key_padding_mask_mode, attn_mask_mode=mode,
        )  # fmt: skip


def _additive_mask(mask: Tensor, shape: tuple[int, int], mode: str) -> Tensor:
    """A key padding mask as numbers that are added."""
    if mask.shape != shape:
        raise ArgumentError(
            f"key_padding_mask has shape {list(mask.shape)}, expected {list(shape)}"
        )
    if mode == "mul" or mask.dtype == torch.bool:
        return torch.zeros(shape, device=mask.device).masked_fill(mask == 0, -torch.inf)
    return mask.to(torch.float32).contiguous()


def _mask(mask: Tensor, q: Tensor) -> Tensor:
    """An attention mask with four dimensions, as the op takes it: its rows lie together."""
    batch, heads, tokens, _ = q.shape
    whole = (batch, heads, tokens, tokens)
    four = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape)) if mask.dim() < 4 else mask
    if four.dim() != 4 or any(a not in (1, b) for a, b in zip(four.shape, whole, strict=False)):
        raise ArgumentError(
            f"attn_mask has shape {list(mask.shape)}, which does not go with {list(whole)}"
        )
    four = four.to(q.dtype)
    if four.shape[3] != tokens or four.stride(3) != 1:
        four = four.expand(*four.shape[:3], tokens).contiguous()
    return four.expand(whole)
