"""The front end of ``evoformer_attn``: ``opkiln.nn.evoformer_attention``."""

from __future__ import annotations

from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.checks import call_checked
from opkiln.ops.evoformer_attn.functions import evoformer_attention as _attention


def evoformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """``softmax(scale * q @ k.T + mask_bias + pair_bias) @ v`` for each row and head.

    ``q``, ``k`` and ``v`` are [batch, rows, length, heads, head], each with any strides; without
    ``batch``, the biases have no batch either. Each row of an alignment, or of a pair
    representation, attends within itself. ``mask_bias``, [batch, rows, 1, 1, length], is added to
    all scores of a key; ``pair_bias``, [batch, 1, heads, length, length], to the scores of all
    rows. ``scale`` is 1 / sqrt(head) unless given. The result has the shape of ``q``. All five
    tensors may have gradients, which are the same to the bit in each run.

    fp16 and bf16 with heads of up to 64, a multiple of 8, run on tensor cores of NVIDIA GPUs, and
    fp32, bf16 and fp16 in a kernel on CPUs. Neither keeps scores in memory. Other calls run as the
    reference, which does. Raises UsageError, naming the argument.
    """
    if q.dim() == 4:
        biases = (None if each is None else each[None] for each in (mask_bias, pair_bias))
        return evoformer_attention(q[None], k[None], v[None], *biases, scale=scale)[0]
    if q.dim() != 5:
        raise ArgumentError(
            f"q has shape {list(q.shape)}, expected [batch, rows, length, heads, head]"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return call_checked(_attention, q, k, v, mask_bias, pair_bias, scale)[0]
