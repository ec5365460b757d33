"""DeepSpeed-FastGen's modules ``ragged_device_ops`` and ``ragged_ops``, over opkiln's ops for
ragged batches. Results go to the tensors that are given, as in DeepSpeed's binding.

A batch is described by ``batch_metadata`` (its tokens and sequences), ``seq_metadata`` (first
token, tokens and tokens seen of each sequence), ``tokens_to_seq`` and ``kv_ptrs`` (addresses of the
lists of blocks). Tokens after the batch's are padding, and their rows stay as they are.
docs/deepspeed.md says what differs from DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import takes
from opkiln.errors import UsageError
from opkiln.ops.kv_attention.attention import KVCache, attention
from opkiln.ops.ragged_device_ops.functions import gating, paged, rows
from opkiln.ops.transformer_inference.functions.rotary import rotary

_UNASSIGNED = -1
_START, _TOKENS, _SEEN = range(3)  # columns of seq_metadata

# ragged_ops: memory of the host for the description of a batch


def allocate_fast_host_buffer(device_mirror: Tensor) -> Tensor:
    """Memory of the host with the shape and dtype of a tensor."""
    return torch.empty(device_mirror.shape, dtype=device_mirror.dtype)


def allocate_view_on(tensor: Tensor, buffer: Tensor, offset: int) -> Tensor:
    """A view of a buffer from a byte on, with the shape, strides and dtype of a tensor."""
    return allocate_view_like(tensor.shape, tensor.stride(), tensor, buffer, offset)


def allocate_view_like(
    shape: Sequence[int], strides: Sequence[int], like: Tensor, buffer: Tensor, offset: int
) -> Tensor:
    """A view of a buffer from a byte on, with the dtype of a tensor."""
    dtype, first = like.dtype, buffer.storage_offset() * buffer.element_size() + offset
    if first % dtype.itemsize:
        raise UsageError(f"offset is {offset}: {dtype} needs a multiple of {dtype.itemsize} bytes")
    made = torch.empty(0, dtype=dtype, device=buffer.device)
    return made.set_(buffer.untyped_storage(), first // dtype.itemsize, shape, strides)


# The cache of keys and values


@takes("kv_cache q k v batch_metadata seq_metadata tokens_to_seq kv_ptrs")
def linear_kv_copy(given: Any) -> None:
    """Write ``k`` and ``v`` to the cache, [blocks, block size, 2, kv heads, head]."""
    k, v = (_heads(each, given.kv_cache) for each in (given.k, given.v))
    paged.paged_kv_copy(k, v, *_target(given))


def kv_rotary_embeddings(
    kv_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, rotary_dim: int, theta: float, *batch: Tensor
) -> None:
    """Rotate ``q`` in place; write ``k``, rotated, and ``v`` to the cache."""
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=q.device) / rotary_dim
    inv_freq = (1 / theta**pairs).to(q.dtype).float()
    kv_trained_rotary_embeddings(kv_cache, q, k, v, inv_freq, *batch)


@takes("kv_cache q k v inv_freq batch_metadata seq_metadata tokens_to_seq kv_ptrs")
def kv_trained_rotary_embeddings(given: Any) -> None:
    """``kv_rotary_embeddings`` with the frequencies of each pair, fp32 [pairs]."""
    inv_freq, cache = given.inv_freq, given.kv_cache
    if inv_freq.dtype != torch.float32 or inv_freq.dim() != 1:
        raise UsageError(
            f"inv_freq is {inv_freq.dtype} {list(inv_freq.shape)}, expected torch.float32 [pairs]"
        )
    target = _target(given)
    sequences, positions = target[-2:]
    angles = positions.clamp(min=0).double()[:, None] * inv_freq.double()
    cos, sin = angles.cos().float(), angles.sin().float()
    # A token's angles are a row of these tables.
    turned, keys = (
        rotary(_heads(x, cache), None, cos, sin, 2 * len(inv_freq)) for x in (given.q, given.k)
    )
    paged.paged_kv_copy(keys, _heads(given.v, cache), *target)
    _keep_padding(given.q, turned.flatten(1), sequences >= 0)


def _heads(x: Tensor, kv_cache: Tensor) -> Tensor:
    return x.view(len(x), -1, kv_cache.shape[4])


def _places(tokens: int, given: Any) -> tuple[Tensor, Tensor]:
    """The sequence of each token and its place there, int32; -1 for padding. The tensors of a batch
    may have more rows than ``tokens_to_seq``."""
    of = given.tokens_to_seq
    at = torch.arange(tokens, dtype=torch.int32, device=of.device)
    sequences = of.new_full((tokens,), -1)
    sequences[: len(of)] = of[:tokens]
    real = (at < given.batch_metadata[0]) & (sequences >= 0)
    row = given.seq_metadata[sequences.clamp(min=0)]
    positions = row[:, _SEEN] + at - row[:, _START]
    return torch.where(real, sequences, -1), torch.where(real, positions, -1)


def _target(given: Any) -> tuple[Tensor, ...]:
    """The place for the keys and values of tokens, as the last arguments of the paged functions:
    the keys and the values of the cache, the table of blocks, and each token's sequence and
    position."""
    cache, kv_ptrs = given.kv_cache, given.kv_ptrs
    lengths = given.seq_metadata[:, _SEEN] + given.seq_metadata[:, _TOKENS]
    sequences = min(len(lengths), len(kv_ptrs))
    # No sequence has more blocks than there are.
    blocks, size = cache.shape[:2]
    table = paged.listed_blocks(kv_ptrs[:sequences], lengths[:sequences], size, blocks)
    return cache[:, :, 0], cache[:, :, 1], table, *_places(len(given.k), given)


def _keep_padding(out: Tensor, found: Tensor, real: Tensor) -> None:
    """Write rows to ``out`` where they are real."""
    out.copy_(torch.where(real[:, None], found, out))


# Attention. An atom is some queries of one sequence, eight int32: the address of the sequence's
# list of blocks (two of them), the first query's row, the queries, the blocks, the keys that the
# last query sees, the first query's place in the sequence, and one that nobody uses.

_WIDTH = 8


class Run(NamedTuple):
    """Consecutive queries of one sequence."""

    address: int
    start: int
    queries: int
    extent: int  # the keys that the last query sees


@takes("atoms batch_metadata seq_metadata kv_ptrs q_block_size kv_block_size")
def build_atoms(given: Any) -> int:
    """Write the atoms of a batch, with at most ``q_block_size`` queries each. All tensors are on
    the host. Returns how many there are."""
    described = given.seq_metadata[: int(given.batch_metadata[1])].tolist()
    made, owners = [], []
    for sequence, (start, tokens, seen, _) in enumerate(described):
        for first in range(0, tokens, given.q_block_size):
            queries = min(given.q_block_size, tokens - first)
            extent = seen + first + queries
            blocks = -(-extent // given.kv_block_size)
            made.append((start + first, queries, blocks, extent, seen + first))
            owners.append(sequence)
    if made:
        atoms = given.atoms.view(-1, _WIDTH)[: len(made)]
        atoms[:, :2] = given.kv_ptrs[owners].view(torch.int32).view(-1, 2)
        atoms[:, 2:-1] = torch.tensor(made, dtype=torch.int32)
    return len(made)


@takes("out q k v atoms softmax_scale is_causal")
def flash_attn_by_atoms(given: Any) -> None:
    """Attend from ``q``, [tokens, heads * head], to the cache's ``k`` and ``v``, [blocks, block
    size, kv heads, head], and write ``out``. Rows that no atom has are left alone."""
    runs = _runs(given.atoms, merge=given.is_causal)
    single = [each for each in runs if each.queries == 1]
    for batch in ([single] if single else []) + [[each] for each in runs if each.queries != 1]:
        _attend(batch, given)


def _attend(batch: list[Run], given: Any) -> None:
    """Attend for runs that have equally many queries."""
    q, k, out = given.q, given.k, given.out
    size, head = k.shape[1], k.shape[3]
    extent = max(each.extent for each in batch)
    addresses = torch.tensor([each.address for each in batch], device=q.device)
    lengths = torch.tensor([each.extent for each in batch], dtype=torch.int32, device=q.device)
    table = paged.listed_blocks(addresses, lengths, size, -(-extent // size)).clamp(min=0)
    start, queries = batch[0].start, batch[0].queries
    at = torch.tensor([each.start for each in batch], device=q.device)
    rows = q[at][:, None] if queries == 1 else q[None, start : start + queries]
    turned = rows.reshape(*rows.shape[:2], -1, head).transpose(1, 2)
    found = attention(
        turned, None, None, KVCache(k, given.v, lengths, table), scale=given.softmax_scale,
        causal=given.is_causal, context=extent,
    )  # fmt: skip
    found = found.transpose(1, 2).flatten(2)
    if queries == 1:
        out[at] = found[:, 0]
    else:
        out[start : start + queries] = found[0]


def _runs(atoms: Tensor, merge: bool) -> list[Run]:
    """The atoms; with ``merge``, those that continue a sequence are one."""
    runs: list[Run] = []
    atoms = atoms.reshape(-1, _WIDTH)
    addresses = atoms[:, :2].contiguous().view(torch.int64).flatten().tolist()
    for address, (start, queries, _, extent) in zip(addresses, atoms[:, 2:6].tolist(), strict=True):
        made, last = Run(address, start, queries, extent), runs[-1] if runs else None
        if (
            merge and last is not None and last.address == address
            and last.start + last.queries == start and last.extent + queries == extent
        ):  # fmt: skip
            runs[-1] = last._replace(queries=last.queries + queries, extent=extent)
        else:
            runs.append(made)
    return [each for each in runs if each.queries > 0]


# Rows of tokens


@takes(
    "out input_ids embedding_weight position_weight position_offset batch_metadata seq_metadata "
    "tokens_to_seq kv_ptrs"
)
def ragged_embed(given: Any) -> None:
    """Rows of the table for tokens, with those of their positions, which stay in their table. A
    token that the table does not have is left out."""
    ids, words, places = given.input_ids.flatten(), given.embedding_weight, given.position_weight
    sequences, positions = _places(len(ids), given)
    known = (sequences >= 0) & (ids >= 0) & (ids < len(words))
    at = None
    if places is not None:
        at = (positions + given.position_offset).clamp(0, len(places) - 1)
    found = rows.ragged_embedding(ids.clamp(0, len(words) - 1), words, at, places)
    _keep_padding(given.out[: len(ids)], found, known)


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


@takes("expert_counts scores assignments offsets logits batch_metadata")
def top_k_gating(given: Any) -> None:
    """The experts of each token with the shares that softmax gives them, and its place among the
    tokens of each. Adds the tokens of each expert to ``expert_counts``. Padding has no expert."""
    scores, logits = given.scores, given.logits
    tokens, k = scores.shape
    experts = logits.shape[1]
    padding = (torch.arange(tokens, device=logits.device) >= given.batch_metadata[0])[:, None]
    # Experts that only padding goes to come last, so they change neither places nor shares.
    others = torch.where(padding, torch.inf, -torch.inf).to(logits.dtype).expand(-1, k)
    shares, chosen, slots, counts, ends = gating.top_k_gating(torch.cat((logits, others), 1), k)
    first = (ends - counts)[:experts]
    before = (given.expert_counts - first).to(torch.int32)
    real = chosen.clamp(max=experts - 1)
    scores.copy_(torch.where(padding, scores, shares))
    given.assignments.copy_(torch.where(padding, _UNASSIGNED, chosen))
    given.offsets.copy_(torch.where(padding, _UNASSIGNED, slots + before[real]))
    given.expert_counts.add_(counts[:experts])


@takes("moe_input cumulative_counts mapped_slots activations expert_counts assignments offsets")
def moe_scatter(given: Any) -> None:
    """Rows of tokens, sorted by expert; the sums of the experts' tokens up to each; and the row of
    each token and expert."""
    ends = given.expert_counts.cumsum(0)
    given.cumulative_counts.copy_(ends)
    real = given.assignments != _UNASSIGNED
    first = (ends - given.expert_counts)[given.assignments.clamp(min=0)]
    # Tokens without an expert come last.
    spare = ends[-1] + (~real).flatten().cumsum(0).view_as(real) - 1
    slots = torch.where(real, first + given.offsets, spare).to(torch.int32)
    found = rows.moe_scatter(given.activations, slots)
    used = torch.arange(len(found), device=ends.device) < ends[-1]
    _keep_padding(given.moe_input, found, used)
    given.mapped_slots.copy_(torch.where(real, slots, _UNASSIGNED))


@takes("layer_output moe_output scores mapped_slots expert_counts normalize_scales")
def moe_gather(given: Any) -> None:
    """The sum of each token's rows, with its scores. Sets ``expert_counts`` to 0, for the next
    call of ``top_k_gating``."""
    real = given.mapped_slots != _UNASSIGNED
    shares = given.scores.masked_fill(~real, 0)
    if given.normalize_scales:
        total = shares.sum(1, keepdim=True)
        shares = torch.where(total > 0, shares / total, shares)
    found = rows.moe_gather(given.moe_output, given.mapped_slots.clamp(min=0), shares)
    _keep_padding(given.layer_output, found, real.any(1))
    given.expert_counts.zero_()
