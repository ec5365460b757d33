"""Attention with a cache: the kernel in the emulator against float64, and the front end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kv_cases import CASES, Case, check, make
from torch.nn.functional import scaled_dot_product_attention

import opkiln
from opkiln.errors import FallbackWarning, UsageError
from opkiln.loading import loader
from opkiln.ops.kv_attention.attention import KVCache, attention, chosen_splits
from opkiln.ops.kv_attention.functions import kv_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

# Rows with permuted chunks, rows with a chunk more, and blocks of two warps.
KERNELS = [(64, torch.bfloat16, 0), (80, torch.float16, 16), (256, torch.float16, 0)]
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "half"}


@pytest.fixture(scope="module")
def emulated() -> Iterator[Any]:
    """The op, whose kernels the emulator runs on CPU tensors."""
    loader.forget_references()  # other tests may have found no native version
    kv_attention.builder.EMULATE = True
    yield kv_attention
    kv_attention.builder.EMULATE = False


@pytest.mark.parametrize(("head", "dtype", "blocks"), KERNELS)
def test_the_kernel_is_within_rounding_of_float64(
    emulated: Any, head: int, dtype: torch.dtype, blocks: int, whole_grid: bool
) -> None:
    assert emulated.load("cpu", HEAD=head, T=NAMES[dtype], PAGED=blocks > 0)
    for case in CASES if whole_grid or head == 64 else CASES[2:6:3]:
        check(make(case._replace(blocks=blocks), head, dtype), emulated)


def test_a_result_is_the_same_to_the_bit_each_time(emulated: Any) -> None:
    call = make(Case(heads=8, lengths=(300,), splits=5), 64, torch.bfloat16)
    first = emulated(*call.copied())
    assert all(torch.equal(first, emulated(*call.copied())) for _ in range(3))


def test_nan_and_infinity_in_the_cache_reach_the_heads_that_see_them(emulated: Any) -> None:
    for value in (torch.nan, torch.inf):
        call = make(Case(heads=4, kv_heads=2, lengths=(40, 40)), 64, torch.bfloat16)
        call.v_cache[0, 1, 7] = value
        out = emulated(*call.copied())
        found, theirs = out.isfinite().all(-1), kv_attention.reference(*call).isfinite().all(-1)
        assert torch.equal(found, theirs)
        assert found.sum() == 6


def test_a_cache_in_another_layout_is_served_as_a_view(emulated: Any) -> None:
    call = make(Case(lengths=(50, 20)), 64, torch.bfloat16)
    k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in call[3:5])
    check(call._replace(k_cache=k, v_cache=v), emulated)


def test_rows_at_odd_addresses_go_to_the_reference(emulated: Any) -> None:
    call = make(Case(lengths=(20,)), 64, torch.bfloat16)
    odd = torch.empty(call.q.numel() + 1, dtype=torch.bfloat16)[1:].view_as(call.q).copy_(call.q)
    with pytest.warns(FallbackWarning, match="chose none"):
        check(call._replace(q=odd), emulated)


def test_opcheck_finds_nothing(emulated: Any) -> None:
    torch.library.opcheck(emulated.overload, tuple(make(Case(splits=2), 64, torch.bfloat16)))


def test_a_batch_of_no_sequences_gives_nothing(emulated: Any) -> None:
    call = make(Case(lengths=(3,)), 64, torch.bfloat16)
    none = call._replace(q=call.q[:0], k=call.k[:0], v=call.v[:0], lengths=call.lengths[:0])
    assert emulated(*none).shape == (0, 4, 1, 64)


def test_variants_are_known_by_name_without_torch() -> None:
    name = "kv_attention__HEAD_128_T_half_PAGED_true"
    found = [opkiln.ALL_OPS[each].NAME for each in (name, f"opkiln:{name}")]
    assert found == [name, name]
    assert "kv_attention" in opkiln.ALL_OPS
    assert name not in list(opkiln.ALL_OPS)


# The front end


def sequence(cache: KVCache, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 12, 16, dtype=dtype)
    k, v = torch.randn(2, 2, cache.kv_heads, 12, 16, dtype=dtype).unbind()
    return q, k, v


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_prompt_and_steps_give_what_attention_over_all_tokens_gives(
    paged: bool, known: bool
) -> None:
    cache = KVCache.empty(2, 2, 12, 16, dtype=torch.float32)
    if paged:
        table = torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32)
        k, v = torch.full((2, 6, 4, 2, 16), torch.nan).unbind()
        cache = KVCache(k, v, cache.lengths, table)
    q, k, v = sequence(cache, torch.float32)
    want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    parts = []
    for begin, end in ((0, 7), (7, 8), (8, 11), (11, 12)):
        part = (each[:, :, begin:end] for each in (q, k, v))
        parts.append(attention(*part, cache, context=end if known else None))
        cache.lengths += end - begin
    torch.testing.assert_close(torch.cat(parts, 2), want)


def test_a_compiled_step_is_one_graph() -> None:
    cache = KVCache.empty(2, 2, 12, 16, dtype=torch.float32)
    q, k, v = sequence(cache, torch.float32)
    step = torch.compile(attention, fullgraph=True, backend="aot_eager")
    first = attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], cache)
    torch.testing.assert_close(step(q[:, :, :1], k[:, :, :1], v[:, :, :1], cache), first)


def test_alibi_is_a_bias_by_distance() -> None:
    cache = KVCache.empty(2, 2, 12, 16, dtype=torch.float64)
    q, k, v = sequence(cache, torch.float64)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    place = torch.arange(12.0, dtype=torch.float64)
    bias = slopes.view(-1, 1, 1) * (place - place.view(-1, 1))
    bias = bias.masked_fill(place > place.view(-1, 1), -torch.inf)
    want = scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    out = attention(q, k, v, cache, alibi_slopes=slopes, context=12)
    torch.testing.assert_close(out, want)


def test_wrong_arguments_are_named() -> None:
    cache = KVCache.empty(2, 2, 12, 16, dtype=torch.float32)
    q, k, v = sequence(cache, torch.float32)
    wrong: list[tuple[str, Any]] = [
        ("q has 3 heads of 16, the cache 2 of 16", lambda: attention(q[:, :3], k, v, cache)),
        ("k and v are given together", lambda: attention(q, k, None, cache)),
        ("v has shape", lambda: attention(q, k, v[:, :, :3], cache)),
        ("q is torch.float16", lambda: attention(q.half(), k, v, cache)),
        ("q has 4 sequences", lambda: attention(q.repeat(2, 1, 1, 1), None, None, cache)),
        ("lengths has dtype", lambda: KVCache(cache.k, cache.v, cache.lengths.long())),
        ("context is -1, expected at least", lambda: attention(q, k, v, cache, context=-1)),
        ("alibi_slopes", lambda: attention(q, k, v, cache, alibi_slopes=torch.ones(2))),
    ]
    for message, call in wrong:
        with pytest.raises(UsageError, match=message):
            call()


@pytest.mark.parametrize(
    ("batch", "kv_heads"), [(1, 8), (1, 32), (8, 8), (8, 32), (64, 32), (3, 1)]
)
@pytest.mark.parametrize("context", [1, 1000, 8192, 32768])
def test_splits_use_the_bandwidth_and_leave_no_block_without_keys(
    batch: int, kv_heads: int, context: int
) -> None:
    splits = chosen_splits(batch * kv_heads, context, 132)
    steps = -(-context // 64)
    assert 1 <= splits <= max(steps, 1)
    assert -(-steps // -(-steps // splits)) == splits
    if batch * kv_heads >= 256:
        assert splits == 1
    if context >= 8192 and batch * kv_heads <= 64 and kv_heads > 1:
        assert 96 <= batch * kv_heads * splits <= 264  # enough for the bandwidth, in one round


@pytest.mark.parametrize("paged", [False, True])
def test_a_short_context_has_few_blocks_and_few_parts_where_there_are_clusters(paged: bool) -> None:
    for units, context in ((8, 1024), (32, 1024), (64, 1024), *(() if paged else ((8, 8192),))):
        splits = chosen_splits(units, context, 132, paged, clusters=True)
        assert splits <= 8  # the most blocks of a cluster
        assert 64 <= units * splits <= 132  # a block for each multiprocessor, in one round


@pytest.mark.parametrize("context", [8192, 32768])
@pytest.mark.parametrize("units", [8, 32, 64, 256])
def test_a_long_paged_context_is_shared_as_if_there_were_no_clusters(
    units: int, context: int
) -> None:
    with_clusters = chosen_splits(units, context, 132, paged=True, clusters=True)
    assert with_clusters == chosen_splits(units, context, 132, paged=True)
