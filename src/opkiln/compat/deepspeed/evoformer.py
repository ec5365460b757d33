"""DeepSpeed's module ``evoformer_attn``, over opkiln's op of this name.

``DS4Sci_EvoformerAttention`` calls the two functions with tensors for their results.
docs/deepspeed.md says what differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule, likely_device
from opkiln.ops.evoformer_attn.functions import evoformer_attention, evoformer_attention_backward


class EvoformerAttention(OpModule):
    """``evoformer_attn``: attention over alignments and pairs, and its gradients. A bias without
    elements is none."""

    NAME = "evoformer_attn"

    def _load(self) -> None:
        evoformer_attention.load(likely_device(), dtype="bfloat16")

    @torch.no_grad()
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias1: Tensor, bias2: Tensor, o: Tensor, lse: Tensor
    ) -> None:
        """Write the result to ``o``, and to ``lse``, [rows, heads, length or more], for each query
        the logarithm of its sum of weights."""
        mask, pair = _given(bias1), _given(bias2)
        out, moments = evoformer_attention(q, k, v, mask, pair, q.shape[-1] ** -0.5)
        o.copy_(out)
        greatest, share = moments.flatten(1, 2).unbind()
        lse[..., : q.shape[-3]] = greatest - share.log2()

    @torch.no_grad()
    def attention_bwd(
        self,
        go: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        delta: Tensor,
        bias1: Tensor,
        bias2: Tensor,
        *to: Tensor,
    ) -> None:
        """Write the gradients of ``q``, ``k``, ``v`` and the biases to the last five tensors, but
        for biases' that have no elements. ``delta`` is memory for DeepSpeed's kernel."""
        del delta
        logarithms = lse[..., : q.shape[-3]]
        moments = torch.stack([logarithms, torch.ones_like(logarithms)])
        moments = moments.view(2, *q.shape[:2], *logarithms.shape[1:])
        wanted = (tensor.numel() > 0 for tensor in to[3:])
        found = evoformer_attention_backward(
            go, q, k, v, o, moments, _given(bias1), _given(bias2), q.shape[-1] ** -0.5, *wanted
        )
        for tensor, value in zip(to, found, strict=True):
            if value.numel():
                tensor.copy_(value)


def _given(bias: Tensor) -> Tensor | None:
    return bias if bias.numel() else None
