"""The front end of ``kv_attention``: ``opkiln.nn.inference.attention`` and ``KVCache``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.ops.checks import runs_cuda_kernels
from opkiln.ops.kv_attention.functions import append, check_places, kv_attention

_COUNTERS = 4096  # a GPU that has more pairs of sequences and heads to work on need not split them
_MOST_TOKENS = 8  # of one sequence that the decode kernel takes; more are a prompt
_BLOCK_KEYS = 64  # that a block of the kernel reads at a time
_MOST_SPLITS = 128
_MOST_CLUSTERED = 8  # blocks that add up their parts as a cluster
_CLUSTERED_STEPS = 8  # of a block of a cluster, unless it has twice the warps
_MOST_WIDE = 64  # blocks that have twice the warps: one for each multiprocessor
_CLUSTERS_NEED = 200 << 10  # bytes of shared memory that a block may have


class KVCache:
    """The keys and values of a batch of sequences, for one layer.

    ``k`` and ``v`` are [batch, kv heads, capacity, head]: the tokens of a head lie together, and
    torch's attention takes them as they are. A view of another layout with these dimensions will
    do. With ``block_table``, int32 [batch, blocks of a sequence], they are [blocks, block size, kv
    heads, head], and the table says which blocks hold a sequence, in order.

    ``lengths``, int32 [batch], counts the tokens of each sequence. ``attention`` reads it on the
    device and does not change it: layers may share one, and the caller adds the new tokens once
    all layers have run. Use a cache on one stream at a time. Raises UsageError.
    """

    def __init__(
        self, k: Tensor, v: Tensor, lengths: Tensor, block_table: Tensor | None = None
    ) -> None:
        if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype or k.device != v.device:
            raise ArgumentError(
                f"k is {k.dtype} {list(k.shape)} on {k.device}, v {v.dtype} {list(v.shape)} on "
                f"{v.device}; both have the same four dimensions"
            )
        for name, given in (("lengths", lengths), ("block_table", block_table)):
            if given is not None and given.dtype != torch.int32:
                raise ArgumentTypeError(f"{name} has dtype {given.dtype}, expected int32")
        self.k, self.v, self.lengths, self.block_table = k, v, lengths, block_table
        self.counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=k.device)
        self.processors, self.clusters = 1, False
        if k.is_cuda:
            gpu = torch.cuda.get_device_properties(k.device)
            self.processors = gpu.multi_processor_count
            shared = getattr(gpu, "shared_memory_per_block_optin", 0)  # ROCm has no such number
            self.clusters = shared >= _CLUSTERS_NEED

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        capacity: int,
        head: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """A cache without tokens."""
        k = torch.empty(batch, kv_heads, capacity, head, dtype=dtype, device=device)
        return cls(k, torch.empty_like(k), torch.zeros(batch, dtype=torch.int32, device=device))

    @property
    def kv_heads(self) -> int:
        """The heads of keys and values."""
        return self.k.shape[1 if self.block_table is None else 2]

    @property
    def capacity(self) -> int:
        """The tokens that a sequence has room for."""
        if self.block_table is None:
            return self.k.shape[2]
        return self.block_table.shape[1] * self.k.shape[1]


def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: KVCache,
    *,
    scale: float | None = None,
    causal: bool = True,
    alibi_slopes: Tensor | None = None,
    context: int | None = None,
) -> Tensor:
    """Append ``k`` and ``v`` to the cache, and attend from ``q`` to all of it.

    ``q`` is [batch, heads, tokens, head]; ``k`` and ``v`` are [batch, kv heads, tokens, head], or
    both None if the cache has these tokens. A kv head serves ``heads / kv_heads`` query heads. The
    result has the shape of ``q``. ``scale`` is 1 / sqrt(head) unless given. With ``causal``, a
    token sees itself and what comes before it. ``alibi_slopes`` is float32 [heads].

    ``context`` is the most tokens that a sequence has after this call, if the caller knows: less
    memory is looked at, and with ``context`` equal to ``tokens`` the sequences are known to be new.
    The lengths stay on the device: a call can be captured in a CUDA graph.

    Up to 8 tokens of fp16 or bf16 with heads of 64, 80, 96, 128, 192 or 256 run in one kernel on
    NVIDIA GPUs; other calls use ``torch.nn.functional.scaled_dot_product_attention``. There is no
    gradient. A length below 0, a token without room and a block that is not there are errors: on a
    GPU assertions, as with torch's own functions. Raises UsageError.
    """
    batch, heads, tokens, head = _check(q, k, v, cache, alibi_slopes)
    scale = head**-0.5 if scale is None else scale
    if context is not None and context < tokens:
        raise ArgumentError(f"context is {context}, expected at least {tokens}, the tokens of q")
    most = cache.capacity if context is None else min(context, cache.capacity)
    keys, values, table = _narrow(cache, batch, most)
    lengths = cache.lengths if cache.lengths.shape[0] == batch else cache.lengths[:batch]
    if k is not None and v is not None and tokens > 1 and most == tokens and alibi_slopes is None:
        check_places(tokens, keys, lengths, table)
        append(k, v, keys, values, lengths, table)
        return scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=heads != cache.kv_heads
        )
    on_cuda = runs_cuda_kernels(q, kv_attention.builder)
    decode = on_cuda and tokens <= _MOST_TOKENS and q.dtype in (torch.float16, torch.bfloat16)
    # A prompt behind other tokens, fp32 and the CPU: the reference is torch's attention.
    call = kv_attention if decode else kv_attention.reference
    group = heads // cache.kv_heads
    units = batch * cache.kv_heads * -(-group * tokens // 16)
    paged = table is not None
    splits = chosen_splits(units, most, cache.processors, paged, cache.clusters) if decode else 1
    out: Tensor = call(
        q, k, v, keys, values, lengths, table, alibi_slopes, cache.counters, scale, causal, splits
    )
    return out


def chosen_splits(
    units: int, context: int, processors: int, paged: bool = False, clusters: bool = False
) -> int:
    """How many blocks share a sequence, for ``units`` pairs of a sequence and a kv head."""
    steps = max(-(-context // _BLOCK_KEYS), 1)
    return _splits(units, steps, processors, paged, clusters)


@functools.lru_cache(maxsize=1024)
def _splits(units: int, steps: int, processors: int, paged: bool, clusters: bool) -> int:
    """The number whose calls take the least time, of those that give all blocks the same steps.

    Time is counted in steps of a block that has the GPU for itself. Two blocks run on each
    multiprocessor, but fewer use all of the memory's bandwidth; more make each other slower. A
    block that looks up where its keys are is slower by itself. Adding up the parts takes time of
    its own, more with each part, and less within a cluster. Where there are clusters, few blocks
    do two steps at a time, unless paged. The numbers fit what was measured on an H200.
    """
    slots, saturating = 2 * processors, 0.62 * processors
    alone = 1.3 if paged else 1.0

    def cost(splits: int) -> float:
        blocks, each = units * splits, -(-steps // splits)
        wide = clusters and not paged and blocks <= _MOST_WIDE
        if wide:
            time = -(-each // 2) * max(alone, 1.96 * blocks / saturating) + 0.4
        else:
            rounds, rest = divmod(blocks, slots)
            last = max(alone, rest / saturating) if rest else 0.0
            time = each * (rounds * slots / saturating + last)
        if splits == 1:
            return time
        clustered = clusters and splits <= _MOST_CLUSTERED and (wide or each <= _CLUSTERED_STEPS)
        return time + (1.5 if clustered else 3.5 + splits / 12)

    # As few as give blocks their share.
    shares = {-(-steps // -(-steps // splits)) for splits in range(1, min(steps, _MOST_SPLITS) + 1)}
    return min(sorted(shares), key=cost)


def _narrow(cache: KVCache, batch: int, most: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The part of a cache that a call looks at. A slice of all costs as much as a small kernel."""
    table = cache.block_table
    if table is None:
        if most == cache.k.shape[2] and batch == cache.k.shape[0]:
            return cache.k, cache.v, None
        return cache.k[:batch, :, :most], cache.v[:batch, :, :most], None
    needed = -(-most // cache.k.shape[1])
    if table.shape != (batch, needed):
        table = table[:batch, :needed]
    return cache.k, cache.v, table


def _check(
    q: Tensor, k: Tensor | None, v: Tensor | None, cache: KVCache, slopes: Tensor | None
) -> tuple[int, int, int, int]:
    """The sizes of q. Raises UsageError."""
    if q.dim() != 4:
        raise ArgumentError(f"q has shape {list(q.shape)}, expected [batch, heads, tokens, head]")
    batch, heads, tokens, head = q.shape
    kv_heads = cache.kv_heads
    if cache.k.shape[3] != head or heads % kv_heads != 0:
        raise ArgumentError(
            f"q has {heads} heads of {head}, the cache {kv_heads} of {cache.k.shape[3]}",
            why="a kv head serves the same number of query heads, of its own size",
        )
    if cache.k.dtype != q.dtype or cache.k.device != q.device:
        raise ArgumentTypeError(
            f"q is {q.dtype} on {q.device}, the cache {cache.k.dtype} on {cache.k.device}"
        )
    if (k is None) != (v is None):
        raise ArgumentError("k and v are given together, or neither is")
    for name, given in (("k", k), ("v", v)):
        if given is not None and given.shape != (batch, kv_heads, tokens, head):
            raise ArgumentError(
                f"{name} has shape {list(given.shape)}, expected {[batch, kv_heads, tokens, head]}"
            )
    rows = cache.lengths.shape[0] if cache.block_table is None else cache.block_table.shape[0]
    if min(cache.lengths.shape[0], rows) < batch:
        raise ArgumentError(f"q has {batch} sequences, the cache {min(rows, len(cache.lengths))}")
    if slopes is not None and (slopes.shape != (heads,) or slopes.dtype != torch.float32):
        raise ArgumentError(
            f"alibi_slopes is {slopes.dtype} {list(slopes.shape)}, expected float32 [{heads}]"
        )
    return batch, heads, tokens, head
