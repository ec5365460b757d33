"""``paged_kv_copy`` and ``paged_kv_rotary``: the CUDA kernels in the emulator and the reference,
against complex numbers in float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from ragged_fixtures import REFERENCES, kernels
from stand_in import poisoned
from torch import Tensor

from opkiln.nn import ragged

DTYPES = F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# A rounding of a result that is at most |a| + |b|.
ROUNDING = {torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MISSING = 77.0  # what nobody has written to a cache


@pytest.fixture(params=["emulated", "reference"])
def op(request: pytest.FixtureRequest) -> Any:
    return kernels() if request.param == "emulated" else REFERENCES


class Batch(NamedTuple):
    """Sequences with blocks in a shuffled order."""

    block_table: Tensor
    sequences: Tensor
    positions: Tensor
    k_cache: Tensor
    v_cache: Tensor

    @classmethod
    def of(
        cls, tokens: list[tuple[int, int]], heads: int, head: int, size: int, dtype: torch.dtype
    ) -> Batch:
        """``tokens`` has the new and the seen tokens of each sequence."""
        most = max([-(-(new + seen) // size) for new, seen in tokens], default=0)
        blocks = len(tokens) * most + 2
        table = torch.randperm(blocks)[: len(tokens) * most].view(len(tokens), most).int()
        rows = [torch.full((new,), at) for at, (new, _) in enumerate(tokens)]
        places = [torch.arange(seen, seen + new) for new, seen in tokens]
        none = torch.zeros(0)
        caches = (torch.full((blocks, size, heads, head), MISSING, dtype=dtype) for _ in range(2))
        return cls(table, torch.cat([none, *rows]).int(), torch.cat([none, *places]).int(), *caches)

    @property
    def at(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.k_cache, self.v_cache, self.block_table, self.sequences, self.positions

    def found(self, cache: Tensor) -> Tensor:
        """What the cache has of each token; nothing else may have been written."""
        size = cache.shape[1]
        out, left = [], torch.ones(cache.shape[:2], dtype=torch.bool)
        for row, place in zip(self.sequences.tolist(), self.positions.tolist(), strict=True):
            block = int(self.block_table[row, place // size])
            out.append(cache[block, place % size])
            left[block, place % size] = False
        assert (cache[left] == MISSING).all()
        return torch.stack(out) if out else cache.new_zeros(0, *cache.shape[2:])


def turned(x: Tensor, positions: Tensor, dim: int, theta: float) -> Tensor:
    """The definition, in complex numbers of float64."""
    pairs = dim // 2
    wide = x.double()
    z = torch.complex(wide[..., :pairs], wide[..., pairs:dim])
    steps = torch.arange(pairs, dtype=torch.float64) / pairs
    z = z * torch.exp(1j * positions.double()[:, None, None] * theta**-steps)
    return torch.cat((z.real, z.imag, wide[..., dim:]), -1)


def close(got: Tensor, expected: Tensor, of: Tensor) -> None:
    bound = ROUNDING[got.dtype] * (2 * of.double().abs().max().item() if of.numel() else 1)
    assert ((got.double() - expected).abs() <= bound).all()


def inputs(count: int, q: int, kv: int, head: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(count, heads, head).to(dtype) for heads in (q, kv, kv))


# Heads of q, of k, their size, the rotated elements, the dtype: whole vectors; a rest of vectors;
# odd sizes that go by elements; one head of few units, so that a block has many tokens; long heads.
SHAPES = (
    (4, 2, 64, 64, F32), (4, 2, 64, 64, F16), (4, 2, 64, 64, BF16), (3, 1, 80, 80, BF16),
    (2, 2, 96, 32, F16), (5, 1, 128, 128, BF16), (1, 1, 16, 16, BF16), (2, 1, 10, 6, F32),
    (1, 1, 7, 4, F16), (1, 1, 2, 2, BF16), (2, 1, 512, 512, BF16), (1, 1, 600, 290, F32),
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_are_rotated_and_written_to_their_blocks(
    op: Any, shape: tuple[int, int, int, int, torch.dtype]
) -> None:
    torch.manual_seed(0)
    q_heads, kv_heads, head, dim, dtype = shape
    batch = Batch.of([(1, 16), (7, 0), (1, 40), (3, 5)], kv_heads, head, 16, dtype)
    q, k, v = inputs(12, q_heads, kv_heads, head, dtype)
    with poisoned():
        out = op.paged_kv_rotary(q, k, v, *batch.at, dim=dim, theta=500.0)
    assert out.is_contiguous()
    close(out, turned(q, batch.positions, dim, 500.0), q)
    keys = batch.found(batch.k_cache)
    close(keys, turned(k, batch.positions, dim, 500.0), k)
    assert torch.equal(keys[..., dim:], k[..., dim:])
    assert torch.equal(batch.found(batch.v_cache), v)


def test_many_tokens_share_a_block_of_the_gpu(op: Any) -> None:
    torch.manual_seed(0)
    for dtype, head, dim in ((F32, 8, 8), (BF16, 16, 16), (F16, 2, 2)):
        batch = Batch.of([(301, 11), (211, 0), (1, 0)], 1, head, 8, dtype)
        q, k, v = inputs(513, 1, 1, head, dtype)
        out = op.paged_kv_rotary(q, k, v, *batch.at, dim=dim)
        close(out, turned(q, batch.positions, dim, 1e4), q)
        close(batch.found(batch.k_cache), turned(k, batch.positions, dim, 1e4), k)
        assert torch.equal(batch.found(batch.v_cache), v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_copied_without_rotary(op: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for heads, head, size in ((2, 64, 16), (1, 8, 4), (3, 5, 1), (1, 1, 128)):
        batch = Batch.of([(2, 3), (0, 9), (300, 0)], heads, head, size, dtype)
        _, k, v = inputs(302, 1, heads, head, dtype)
        k[0, 0, 0], v[1, 0, 0] = math.nan, -math.inf
        op.paged_kv_copy(k, v, *batch.at)
        assert torch.equal(batch.found(batch.k_cache).nan_to_num(5), k.nan_to_num(5))
        assert torch.equal(batch.found(batch.v_cache), v)


def test_far_positions_have_exact_angles(op: Any) -> None:
    k = torch.randn(4, 1, 64)
    at = torch.tensor([0, 8_388_609, 100_000_007, 2**31 - 1], dtype=torch.int32)
    cache = torch.zeros(4, 16, 1, 64)
    padding = torch.full((4,), -1, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    out = op.paged_kv_rotary(k, k, k, cache, cache.clone(), table, padding, at)
    close(out, turned(k, at, 64, 1e4), k)


def test_tables_replace_theta(op: Any) -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        batch = Batch.of([(3, 4), (2, 0)], 2, 32, 4, torch.bfloat16)
        q, k, v = inputs(5, 4, 2, 32, torch.bfloat16)
        angle = torch.randn(9, 8)
        cos, sin = torch.cat((angle.cos(), angle.sin()), 1).to(dtype).chunk(2, 1)
        out = op.paged_kv_rotary(q, k, v, *batch.at, cos=cos, sin=sin, dim=16)
        c, s = (each.double()[batch.positions][:, None] for each in (cos, sin))
        for got, given in ((out, q), (batch.found(batch.k_cache), k)):
            a, b = given.double()[..., :8], given.double()[..., 8:16]
            close(got[..., :16], torch.cat((a * c - b * s, b * c + a * s), -1), given)
            assert torch.equal(got[..., 16:], given[..., 16:])


def test_views_of_one_tensor_and_of_one_cache_are_taken(op: Any) -> None:
    torch.manual_seed(0)
    for width, head in ((0, 32), (1, 30)):  # by vectors, and by elements
        batch = Batch.of([(5, 2), (2, 30)], 2, head, 8, torch.float16)
        qkv = torch.randn(7, width + 8 * head).half()[:, width:].view(7, 8, head)
        q, k, v = qkv.split((4, 2, 2), 1)
        both = torch.full((*batch.k_cache.shape[:2], 2, 2, head), MISSING).half()
        batch = batch._replace(k_cache=both[:, :, 0], v_cache=both[:, :, 1])
        out = op.paged_kv_rotary(q, k, v, *batch.at)
        close(out, turned(q, batch.positions, head, 1e4), q)
        close(batch.found(batch.k_cache), turned(k, batch.positions, head, 1e4), k)
        assert torch.equal(batch.found(batch.v_cache), v)


def test_padding_is_not_written_and_no_token_is_no_work(op: Any) -> None:
    batch = Batch.of([(4, 0)], 1, 16, 4, torch.float32)
    q, k, v = inputs(4, 1, 1, 16, torch.float32)
    for name, wrong in (("sequences", 1), ("positions", 2)):
        changed = getattr(batch, name).clone()
        changed[wrong] = -1
        given = batch._replace(
            k_cache=batch.k_cache.clone(), v_cache=batch.v_cache.clone(), **{name: changed}
        )
        out = op.paged_kv_rotary(q, k, v, *given.at)
        close(out, turned(q, given.positions.clamp(min=0), 16, 1e4), q)
        block = int(batch.block_table[0, 0])
        assert (given.k_cache[block, wrong] == MISSING).all()
        assert (given.k_cache != MISSING).sum() == 3 * 16
        assert (given.v_cache != MISSING).sum() == 3 * 16
    none = Batch.of([(0, 3)], 1, 16, 4, torch.float32)
    assert op.paged_kv_rotary(q[:0], k[:0], v[:0], *none.at).shape == (0, 1, 16)
    assert (none.k_cache == MISSING).all()


def test_wrong_arguments_are_named(op: Any) -> None:
    batch = Batch.of([(4, 0)], 2, 16, 4, torch.float32)
    q, k, v = inputs(4, 4, 2, 16, torch.float32)
    cos = torch.randn(9, 8)
    for message, call in (
        ("v has shape", lambda: op.paged_kv_copy(k, v[1:], *batch.at)),
        ("v has dtype float16", lambda: op.paged_kv_copy(k, v.half(), *batch.at)),
        ("k has", lambda: op.paged_kv_copy(k.int(), v.int(), *batch.at)),
        ("k has shape", lambda: op.paged_kv_copy(k[:, :0], v[:, :0], *batch.at)),
        ("v_cache has shape", lambda: op.paged_kv_copy(
            k, v, *batch._replace(v_cache=batch.v_cache[1:]).at)),
        ("positions has dtype int64", lambda: op.paged_kv_copy(
            k, v, *batch._replace(positions=batch.positions.long()).at)),
        ("sequences has shape", lambda: op.paged_kv_copy(
            k, v, *batch._replace(sequences=batch.sequences[1:]).at)),
        ("q has shape", lambda: op.paged_kv_rotary(q[1:], k, v, *batch.at)),
        ("dim is 7", lambda: op.paged_kv_rotary(q, k, v, *batch.at, dim=7)),
        ("dim is 18", lambda: op.paged_kv_rotary(q, k, v, *batch.at, dim=18)),
        ("theta is 0", lambda: op.paged_kv_rotary(q, k, v, *batch.at, theta=0.0)),
        ("cos and sin", lambda: op.paged_kv_rotary(q, k, v, *batch.at, cos=cos)),
        ("sin has shape", lambda: op.paged_kv_rotary(q, k, v, *batch.at, cos=cos, sin=cos[1:])),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()


def test_they_pass_opcheck_and_compile_without_a_graph_break() -> None:
    batch = Batch.of([(4, 0), (2, 3)], 2, 16, 4, torch.float32)
    q, k, v = inputs(6, 4, 2, 16, torch.float32)
    for name, args in (
        ("paged_kv_rotary", (q, k, v, *batch.at)),
        ("paged_kv_copy", (k, v, *batch.at)),
    ):
        native, declared = (getattr(each, name).overload for each in (kernels(), ragged))
        torch.library.opcheck(native, args, test_utils="test_schema")
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(declared, args, test_utils=tests)

    def step(q: Tensor, k: Tensor, v: Tensor, *at: Tensor) -> Tensor:
        out = ragged.paged_kv_rotary(q * 2, k, v, *at)
        ragged.paged_kv_copy(v, k, *at)
        return out * 0.5

    out = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, *batch.at)
    close(out, turned(q, batch.positions, 16, 1e4), q)
    assert torch.equal(batch.found(batch.k_cache), v)
    assert torch.equal(batch.found(batch.v_cache), k)


def test_listed_blocks_are_read_at_their_addresses(op: Any) -> None:
    rows = torch.randperm(30).int().view(3, 10)
    lengths = torch.tensor([64, 33, 0], dtype=torch.int32)
    lists = torch.tensor([rows[at].data_ptr() for at in (1, 0, 2)])
    with poisoned():
        table = op.listed_blocks(lists, lengths, 16, 5)
    expected = torch.full((3, 5), -1, dtype=torch.int32)
    expected[0, :4], expected[1, :3] = rows[1, :4], rows[0, :3]
    assert torch.equal(table, expected)
    assert torch.equal(op.listed_blocks(lists, lengths, 16, 2), expected[:, :2])
    assert op.listed_blocks(lists, lengths, 16, 0).shape == (3, 0)
    assert op.listed_blocks(lists[:0], lengths[:0], 16, 5).shape == (0, 5)
    for words, wrong in (
        ("lists has dtype", (lists.int(), lengths, 16, 5)),
        ("lengths has dtype", (lists, lengths.long(), 16, 5)),
        ("lengths has shape", (lists, lengths[:2], 16, 5)),
        ("block_size is 0", (lists, lengths, 0, 5)),
    ):
        with pytest.raises(RuntimeError, match=words):
            op.listed_blocks(*wrong)


def test_listed_blocks_passes_opcheck() -> None:
    rows = torch.arange(6, dtype=torch.int32)
    torch.library.opcheck(
        ragged.listed_blocks.overload, (torch.tensor([rows.data_ptr()]), rows[5:], 1, 8)
    )
