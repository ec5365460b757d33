"""Attention of DeepSpeed-FastGen's ragged batches: atoms of work, and the attention over them.

An atom is some queries of one sequence, eight int32: the address of the sequence's list of blocks
(two of them), the first query's row, the queries, the blocks, the keys that the last query sees,
the first query's place in the sequence, and one that nobody uses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opkiln.ops.kv_attention.attention import KVCache, attention
from opkiln.ops.ragged_device_ops.functions.paged import listed_blocks

_WIDTH = 8


class Run(NamedTuple):
    """Queries of one sequence that lie one after the other."""

    address: int
    start: int
    queries: int
    extent: int  # the keys that the last query sees


def build_atoms(
    atoms_ten: Tensor,
    batch_metadata: Tensor,
    seq_metadata: Tensor,
    kv_ptrs: Tensor,
    q_block_size: int,
    kv_block_size: int,
) -> int:
    """Write the atoms of a batch, with at most ``q_block_size`` queries each. All tensors are on
    the host. Returns how many there are."""
    sequences = int(batch_metadata[1])
    given = zip(seq_metadata[:sequences].tolist(), kv_ptrs[:sequences].tolist(), strict=True)
    made = []
    for (start, tokens, seen, _), address in given:
        low, high = _words(address)
        for first in range(0, tokens, q_block_size):
            queries = min(q_block_size, tokens - first)
            extent = seen + first + queries
            blocks = -(-extent // kv_block_size)
            made.append((low, high, start + first, queries, blocks, extent, seen + first))
    if made:
        atoms_ten.view(-1, _WIDTH)[: len(made), : _WIDTH - 1] = torch.tensor(
            made, dtype=torch.int32
        )
    return len(made)


def flash_attn_by_atoms(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_atoms: Tensor,
    softmax_scale: float,
    is_causal: bool,
) -> None:
    """Attend from ``q``, [tokens, heads * head], to the cache's ``k`` and ``v``, [blocks, block
    size, kv heads, head], and write ``out``. Rows that no atom has are left alone."""
    runs = _runs(attention_atoms, merge=is_causal)
    single = [each for each in runs if each.queries == 1]
    for batch in ([single] if single else []) + [[each] for each in runs if each.queries != 1]:
        _attend(out, q, k, v, batch, softmax_scale, is_causal)


def _attend(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: list[Run], scale: float, causal: bool
) -> None:
    """All of a batch have as many queries."""
    size, head = k.shape[1], k.shape[3]
    extent = max(each.extent for each in batch)
    addresses = torch.tensor([each.address for each in batch], device=q.device)
    lengths = torch.tensor([each.extent for each in batch], dtype=torch.int32, device=q.device)
    table = listed_blocks(addresses, lengths, size, -(-extent // size)).clamp(min=0)
    start, queries = batch[0].start, batch[0].queries
    at = torch.tensor([each.start for each in batch], device=q.device)
    rows = q[at][:, None] if queries == 1 else q[None, start : start + queries]
    turned = rows.reshape(*rows.shape[:2], -1, head).transpose(1, 2)
    cache = KVCache(k, v, lengths, table)
    found = attention(turned, None, None, cache, scale=scale, causal=causal, context=extent)
    found = found.transpose(1, 2).flatten(2)
    if queries == 1:
        out[at] = found[:, 0]
    else:
        out[start : start + queries] = found[0]


def _runs(atoms: Tensor, merge: bool) -> list[Run]:
    """The atoms; with ``merge``, those that continue a sequence are one."""
    runs: list[Run] = []
    for low, high, start, queries, _, extent, *_ in atoms.reshape(-1, _WIDTH).tolist():
        made = Run((high & 0xFFFFFFFF) << 32 | (low & 0xFFFFFFFF), start, queries, extent)
        last = runs[-1] if runs else None
        if (
            merge and last is not None and last.address == made.address
            and last.start + last.queries == start and last.extent + queries == extent
        ):  # fmt: skip
            runs[-1] = last._replace(queries=last.queries + queries, extent=extent)
        else:
            runs.append(made)
    return [each for each in runs if each.queries > 0]


def _words(address: int) -> tuple[int, int]:
    """An address as two int32, the lower one first, as in memory."""
    low, high = address & 0xFFFFFFFF, address >> 32 & 0xFFFFFFFF
    return low - (1 << 32 if low >= 1 << 31 else 0), high - (1 << 32 if high >= 1 << 31 else 0)
