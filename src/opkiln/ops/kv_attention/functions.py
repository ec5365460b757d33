"""``kv_attention``: the op and its reference. ``attention.py`` is the front end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from opkiln.ops.checks import KERNEL_TYPES, check_all, check_within, dtype_name
from opkiln.ops.kv_attention.op import kit


@kit.op(mutates=("k_cache", "v_cache", "counters"))
def kv_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    slopes: Tensor | None,
    counters: Tensor,
    scale: float,
    causal: bool,
    splits: int,
) -> Tensor:
    """Append ``k`` and ``v`` to the cache, and attend from ``q`` to all of it.

    ``attention`` and ``KVCache`` say what the arguments are. ``counters`` are int32 zeros, and
    zeros again after the call. ``splits`` is how many blocks of the GPU share a sequence. A query
    that sees no key gives zeros.
    """
    del counters, splits  # for kernels
    check_places(q.shape[2] if k is not None else 0, k_cache, lengths, block_table)
    if k is not None and v is not None:
        append(k, v, k_cache, v_cache, lengths, block_table)
    tokens = q.shape[2]
    total = (lengths.long() + (tokens if k is not None else 0)).view(-1, 1, 1, 1)
    keys, values = (read_cache(each, block_table)[: q.shape[0]] for each in (k_cache, v_cache))
    key = torch.arange(keys.shape[2], device=q.device)
    query = total - tokens + torch.arange(tokens, device=q.device).view(-1, 1)
    seen = key < total
    # What is behind the last token may be anything, also NaN.
    unused = ~seen.view(-1, 1, keys.shape[2], 1)
    keys, values = keys.masked_fill(unused, 0), values.masked_fill(unused, 0)
    if causal:
        seen = seen & (key <= query)
    mask = seen.expand(-1, -1, tokens, -1)
    blind = ~mask.any(-1, keepdim=True)
    mask = mask | blind
    if slopes is not None:
        bias = slopes.view(-1, 1, 1) * (key - query)
        mask = bias.masked_fill(~mask, -torch.inf).to(q.dtype)
    repeated = q.shape[1] != keys.shape[1]
    out = scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, scale=scale, enable_gqa=repeated
    )
    return _result(q).copy_(out.masked_fill(blind, 0))


@kv_attention.fake
def _result(q: Tensor, *_: object) -> Tensor:
    """The tokens of a sequence lie one after the other, as the next linear layer reads them."""
    batch, heads, tokens, head = q.shape
    return q.new_empty(batch, tokens, heads, head).transpose(1, 2)


@kv_attention.variant
def _(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    _lengths: Tensor,
    block_table: Tensor | None,
    *_: object,
) -> dict[str, int | str | bool] | None:
    if not (_fits(q) and _fits(k_cache) and k_cache.stride() == v_cache.stride()):
        return None
    if k is not None and v is not None and not (_fits(k) and k.stride() == v.stride()):
        return None
    return {
        "HEAD": q.shape[3],
        "T": KERNEL_TYPES.get(q.dtype) or dtype_name(q.dtype),
        "PAGED": block_table is not None,
    }


def _fits(x: Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes, in 16-bit types."""
    batch, head, token, one = x.stride()
    return one == 1 and (batch | head | token) % 8 == 0 and x.storage_offset() % 8 == 0


def check_places(added: int, k_cache: Tensor, lengths: Tensor, block_table: Tensor | None) -> None:
    """Every sequence has room for its tokens and so many more, in blocks that are there."""
    size = k_cache.shape[1] if block_table is not None else 1
    room = k_cache.shape[2] if block_table is None else block_table.shape[1] * size
    check_within("lengths", lengths, 0, room - added)
    if block_table is not None:
        first = torch.arange(block_table.shape[1], device=lengths.device) * size
        there = (block_table >= 0) & (block_table < k_cache.shape[0])
        unused = first >= lengths.long().view(-1, 1) + added
        check_all(there | unused, f"block_table has a block outside of 0 to {k_cache.shape[0] - 1}")


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
) -> None:
    """Write new tokens to a cache, behind the ``lengths`` that it has."""
    place = lengths.long().view(-1, 1) + torch.arange(k.shape[2], device=k.device)
    if block_table is None:
        batch = torch.arange(k.shape[0], device=k.device).view(-1, 1)
        k_cache[batch, :, place] = k.transpose(1, 2)
        v_cache[batch, :, place] = v.transpose(1, 2)
        return
    size = k_cache.shape[1]
    block = block_table.gather(1, place // size).long()
    k_cache[block, place % size] = k.transpose(1, 2)
    v_cache[block, place % size] = v.transpose(1, 2)


def read_cache(cache: Tensor, block_table: Tensor | None) -> Tensor:
    """A cache as [batch, kv heads, tokens, head]. Blocks that are not given may be any."""
    if block_table is None:
        return cache
    return cache[block_table.long().clamp(0, cache.shape[0] - 1)].flatten(1, 2).transpose(1, 2)
