"""DeepSpeed-FastGen's modules ``ragged_device_ops`` and ``ragged_ops``, over opkiln's ops for
ragged batches. Results go to the tensors that are given, as in DeepSpeed's binding.

A batch is described by ``batch_metadata`` (its tokens and sequences), ``seq_metadata`` (first
token, tokens and tokens seen of each sequence), ``tokens_to_seq`` and ``kv_ptrs`` (addresses of the
lists of blocks). Tokens behind the batch's are padding, and what belongs to them is left alone.
docs/deepspeed.md says what differs from DeepSpeed.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError
from opkiln.ops.kv_attention.attention import KVCache, attention
from opkiln.ops.ragged_device_ops.functions import experts as moe
from opkiln.ops.ragged_device_ops.functions import paged, rows
from opkiln.ops.transformer_inference.functions.rotary import rotary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_UNASSIGNED = -1
_START, _TOKENS, _SEEN = range(3)  # columns of seq_metadata


class RaggedDeviceOps(OpModule):
    """``ragged_device_ops``: FastGen's kernels on a ragged batch."""

    NAME = "ragged_device_ops"

    def _load(self) -> None:
        if torch.cuda.is_available():
            paged.paged_kv_copy.load("cuda")
        self._take(sys.modules[__name__])


class RaggedHostOps(OpModule):
    """``ragged_ops``: memory of the host for the description of a batch."""

    NAME = "ragged_ops"

    def allocate_fast_host_buffer(self, device_mirror: Tensor) -> Tensor:
        """Memory of the host with the shape and dtype of a tensor."""
        return torch.empty(device_mirror.shape, dtype=device_mirror.dtype)

    def allocate_view_on(self, tensor: Tensor, buffer: Tensor, offset: int) -> Tensor:
        """A view of a buffer from a byte on, with the shape, strides and dtype of a tensor."""
        return _view(buffer, offset, tensor.dtype, tensor.shape, tensor.stride())

    def allocate_view_like(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dummy_tensor: Tensor,
        buffer: Tensor,
        offset: int,
    ) -> Tensor:
        """A view of a buffer from a byte on, with the dtype of a tensor."""
        return _view(buffer, offset, dummy_tensor.dtype, shape, strides)


def _view(
    buffer: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    first = buffer.storage_offset() * buffer.element_size() + offset
    if first % dtype.itemsize:
        raise UsageError(f"offset is {offset}: {dtype} needs a multiple of {dtype.itemsize} bytes")
    made = torch.empty(0, dtype=dtype, device=buffer.device)
    return made.set_(buffer.untyped_storage(), first // dtype.itemsize, shape, strides)


# The cache of keys and values


class _Batch(NamedTuple):
    """The last arguments of several functions: they describe a batch."""

    batch_metadata: Tensor
    seq_metadata: Tensor
    tokens_to_seq: Tensor
    kv_ptrs: Tensor


def linear_kv_copy(kv_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, *batch: Tensor) -> None:
    """Write ``k`` and ``v`` to the cache, [blocks, block size, 2, kv heads, head]."""
    del q  # DeepSpeed's binding takes its strides
    target = _target(kv_cache, len(k), _Batch(*batch))
    paged.paged_kv_copy(_heads(k, kv_cache), _heads(v, kv_cache), *target)


def kv_rotary_embeddings(
    kv_cache: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary_dim: int,
    theta_base: float,
    *batch: Tensor,
) -> None:
    """Rotate ``q`` in place; write ``k``, rotated, and ``v`` to the cache."""
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=q.device) / rotary_dim
    inv_freq = (1 / theta_base**pairs).to(q.dtype).float()
    kv_trained_rotary_embeddings(kv_cache, q, k, v, inv_freq, *batch)


def kv_trained_rotary_embeddings(
    kv_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, inv_freq: Tensor, *batch: Tensor
) -> None:
    """``kv_rotary_embeddings`` with the frequencies of each pair, fp32 [pairs]."""
    if inv_freq.dtype != torch.float32 or inv_freq.dim() != 1:
        raise UsageError(
            f"inv_freq is {inv_freq.dtype} {list(inv_freq.shape)}, expected torch.float32 [pairs]"
        )
    target = _target(kv_cache, len(k), _Batch(*batch))
    angles = target.positions.clamp(min=0).double()[:, None] * inv_freq.double()
    cos, sin = angles.cos().float(), angles.sin().float()
    # A token's angles are a row of these tables.
    turned, keys = (rotary(_heads(x, kv_cache), None, cos, sin, 2 * len(inv_freq)) for x in (q, k))
    paged.paged_kv_copy(keys, _heads(v, kv_cache), *target)
    _keep_padding(q, turned.flatten(1), target.sequences >= 0)


def _heads(x: Tensor, kv_cache: Tensor) -> Tensor:
    return x.view(len(x), -1, kv_cache.shape[4])


def _places(tokens: int, batch: _Batch) -> tuple[Tensor, Tensor]:
    """The sequence of each token and its place there, int32; -1 for padding. The tensors of a batch
    may have more rows than ``tokens_to_seq``."""
    of = batch.tokens_to_seq
    at = torch.arange(tokens, dtype=torch.int32, device=of.device)
    sequences = of.new_full((tokens,), -1)
    sequences[: len(of)] = of[:tokens]
    real = (at < batch.batch_metadata[0]) & (sequences >= 0)
    row = batch.seq_metadata[sequences.clamp(min=0)]
    positions = row[:, _SEEN] + at - row[:, _START]
    return torch.where(real, sequences, -1), torch.where(real, positions, -1)


class _Target(NamedTuple):
    """Where the keys and values of tokens go: the last arguments of the paged functions."""

    keys: Tensor
    values: Tensor
    table: Tensor
    sequences: Tensor
    positions: Tensor


def _target(kv_cache: Tensor, tokens: int, batch: _Batch) -> _Target:
    lengths = batch.seq_metadata[:, _SEEN] + batch.seq_metadata[:, _TOKENS]
    sequences = min(len(lengths), len(batch.kv_ptrs))
    # No sequence has more blocks than there are.
    blocks, size = kv_cache.shape[:2]
    table = paged.listed_blocks(batch.kv_ptrs[:sequences], lengths[:sequences], size, blocks)
    return _Target(kv_cache[:, :, 0], kv_cache[:, :, 1], table, *_places(tokens, batch))


def _keep_padding(out: Tensor, found: Tensor, real: Tensor) -> None:
    """Write rows to ``out`` where they are real."""
    out.copy_(torch.where(real[:, None], found, out))


# Attention. An atom is some queries of one sequence, eight int32: the address of the sequence's
# list of blocks (two of them), the first query's row, the queries, the blocks, the keys that the
# last query sees, the first query's place in the sequence, and one that nobody uses.

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
    table = paged.listed_blocks(addresses, lengths, size, -(-extent // size)).clamp(min=0)
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


# Rows of tokens


def ragged_embed(
    embedded_tokens: Tensor,
    input_ids: Tensor,
    embedding_weight: Tensor,
    position_weight: Tensor | None,
    position_embed_offset: int,
    *batch: Tensor,
) -> None:
    """Rows of the table for tokens, with those of their positions, which stay in their table. A
    token that the table does not have is left out."""
    ids = input_ids.flatten()
    sequences, positions = _places(len(ids), _Batch(*batch))
    words = len(embedding_weight)
    given = (sequences >= 0) & (ids >= 0) & (ids < words)
    at = None
    if position_weight is not None:
        at = (positions + position_embed_offset).clamp(0, len(position_weight) - 1)
    found = rows.ragged_embedding(ids.clamp(0, words - 1), embedding_weight, at, position_weight)
    _keep_padding(embedded_tokens[: len(ids)], found, given)


def gather_for_logits(
    final_token_acts: Tensor, all_acts: Tensor, batch_metadata: Tensor, seq_metadata: Tensor
) -> None:
    """The last token's row of each sequence."""
    batch = min(len(final_token_acts), len(seq_metadata))
    of = seq_metadata[:batch]
    real = torch.arange(batch, device=of.device) < batch_metadata[1]
    lengths = torch.where(real, of[:, _TOKENS], 0)
    found = rows.logits_gather(all_acts, of[:, _START].contiguous(), lengths)
    _keep_padding(final_token_acts[:batch], found, real)


# Mixtures of experts


def top_k_gating(
    expert_counts: Tensor,
    scores: Tensor,
    assignments: Tensor,
    offsets: Tensor,
    logits: Tensor,
    batch_metadata: Tensor,
) -> None:
    """The experts of each token with the shares that softmax gives them, and its place among the
    tokens of each. Adds the tokens of each expert to ``expert_counts``. Padding has no expert."""
    tokens, k = scores.shape
    experts = logits.shape[1]
    padding = (torch.arange(tokens, device=logits.device) >= batch_metadata[0])[:, None]
    # Experts that only padding goes to come last, so they change neither places nor shares.
    others = torch.where(padding, torch.inf, -torch.inf).to(logits.dtype).expand(-1, k)
    shares, chosen, slots, counts, ends = moe.top_k_gating(torch.cat((logits, others), 1), k)
    first = (ends - counts)[:experts]
    before = (expert_counts - first).to(torch.int32)
    real = chosen.clamp(max=experts - 1)
    scores.copy_(torch.where(padding, scores, shares))
    assignments.copy_(torch.where(padding, _UNASSIGNED, chosen))
    offsets.copy_(torch.where(padding, _UNASSIGNED, slots + before[real]))
    expert_counts += counts[:experts]


def moe_scatter(
    moe_input: Tensor,
    expert_count_cumsums: Tensor,
    mapped_slots: Tensor,
    activations: Tensor,
    expert_counts: Tensor,
    assignments: Tensor,
    offsets: Tensor,
) -> None:
    """Rows of tokens, sorted by expert; the sums of the experts' tokens up to each; and the row of
    each token and expert."""
    ends = expert_counts.cumsum(0)
    expert_count_cumsums.copy_(ends)
    real = assignments != _UNASSIGNED
    first = (ends - expert_counts)[assignments.clamp(min=0)]
    # What has no expert comes last.
    spare = ends[-1] + (~real).flatten().cumsum(0).view_as(real) - 1
    slots = torch.where(real, first + offsets, spare).to(torch.int32)
    found = moe.moe_scatter(activations, slots)
    used = torch.arange(len(found), device=ends.device) < ends[-1]
    _keep_padding(moe_input, found, used)
    mapped_slots.copy_(torch.where(real, slots, _UNASSIGNED))


def moe_gather(
    layer_output: Tensor,
    moe_output: Tensor,
    scores: Tensor,
    mapped_slots: Tensor,
    expert_counts: Tensor,
    normalize_scales: bool,
) -> None:
    """The sum of each token's rows, with its scores. Sets ``expert_counts`` to 0, for the next
    call of ``top_k_gating``."""
    real = mapped_slots != _UNASSIGNED
    shares = scores.masked_fill(~real, 0)
    if normalize_scales:
        total = shares.sum(1, keepdim=True)
        shares = torch.where(total > 0, shares / total, shares)
    found = moe.moe_gather(moe_output, mapped_slots.clamp(min=0), shares)
    _keep_padding(layer_output, found, real.any(1))
    expert_counts.zero_()
