"""Calls of ``kv_attention`` and what they must give, for the emulator and for GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.ops.kv_attention.functions import kv_attention


class Case(NamedTuple):
    """A call by its sizes. ``blocks``: the size of a block of a paged cache, or 0."""

    heads: int = 4
    kv_heads: int = 1
    lengths: tuple[int, ...] = (130, 0, 64)
    tokens: int = 1
    splits: int = 1
    blocks: int = 0
    appends: bool = True
    causal: bool = True
    alibi: bool = False


# What changes the kernel's path: groups of 1 to 34 query heads, several tokens, no tokens, lengths
# around tiles of 16 and blocks of 64, more splits than keys, more than 64 blocks.
CASES = [
    Case(),
    Case(heads=2, kv_heads=2, lengths=(15, 16, 17), splits=2),
    Case(heads=8, lengths=(255,), splits=4, alibi=True),
    Case(heads=16, lengths=(63, 200), splits=3),
    Case(heads=34, kv_heads=2, lengths=(97,), splits=2),
    Case(heads=6, kv_heads=2, lengths=(129, 3), tokens=5, splits=2, alibi=True),
    Case(heads=4, kv_heads=2, lengths=(70, 8), tokens=8, causal=False),
    Case(heads=4, kv_heads=2, lengths=(0, 65, 1), appends=False, splits=8),
    Case(heads=36, kv_heads=12, lengths=(130, 0, 64), splits=2),
]


class Call(NamedTuple):
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    block_table: Tensor | None
    slopes: Tensor | None
    counters: Tensor
    scale: float
    causal: bool
    splits: int

    def copied(self, dtype: torch.dtype | None = None) -> Call:
        """The same with tensors of its own, the floats in this dtype."""

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            converted = dtype is not None and value.is_floating_point()
            return value.to(dtype, copy=True) if converted else value.clone()

        return Call(*map(copy, self))


def make(case: Case, head: int, dtype: torch.dtype, device: str = "cpu", *, seed: int = 0) -> Call:
    """The arguments of a call. What no token has written in the cache is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    room = max(case.lengths) + case.tokens + 3
    k_cache, v_cache = random(2, batch, kv_heads, room, head).unbind()
    for row, length in enumerate(case.lengths):
        k_cache[row, :, length:] = v_cache[row, :, length:] = torch.nan
    table = None
    if case.blocks:
        count = -(-room // case.blocks)
        order = torch.randperm(batch * count + 2, generator=generator)[: batch * count]
        table = order.view(batch, count).int()
        k_cache, v_cache = (_paged(each, table, case.blocks) for each in (k_cache, v_cache))
    new = random(2, batch, case.tokens, kv_heads, head).transpose(2, 3).unbind()
    call = Call(
        q=random(batch, case.tokens, heads, head).transpose(1, 2),
        k=new[0] if case.appends else None,
        v=new[1] if case.appends else None,
        k_cache=k_cache,
        v_cache=v_cache,
        lengths=torch.tensor(case.lengths, dtype=torch.int32),
        block_table=table,
        slopes=torch.rand(heads, generator=generator) if case.alibi else None,
        counters=torch.zeros(256, dtype=torch.int32),
        scale=head**-0.5,
        causal=case.causal,
        splits=case.splits,
    )
    return Call(*(each.to(device) if isinstance(each, Tensor) else each for each in call))


def _paged(cache: Tensor, table: Tensor, size: int) -> Tensor:
    """A cache in blocks; blocks that no sequence has are NaN."""
    batch, kv_heads, room, head = cache.shape
    whole = cache.new_full((batch, kv_heads, table.shape[1] * size, head), torch.nan)
    whole[:, :, :room] = cache
    out = cache.new_full((table.numel() + 2, size, kv_heads, head), torch.nan)
    out[table.long()] = whole.transpose(1, 2).unflatten(1, (-1, size))
    return out


def check(call: Call, function: Any = kv_attention) -> None:
    """Call, and compare with float64: the result within the rounding of weights and of results to
    the dtype, the cache to the bit."""
    dtype = call.q.dtype
    plain = call.copied()
    kv_attention.reference(*plain)
    exact = kv_attention.reference(*call.copied(torch.float64))
    positive = call.copied(torch.float64)
    sizes = kv_attention.reference(
        *positive._replace(
            v=None if positive.v is None else positive.v.abs(), v_cache=positive.v_cache.abs()
        )
    )
    out = function(*call)
    assert out.shape == exact.shape
    assert out.stride() == exact.stride()
    error = (out.double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps * sizes + 1e-5).all()), error.max()
    for ours, theirs in zip(call[3:5], plain[3:5], strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    assert not call.counters.any()
