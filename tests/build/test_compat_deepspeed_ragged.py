"""DeepSpeed's modules ``ragged_device_ops`` and ``ragged_ops`` over opkiln's ops."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from deepspeed_given import warm  # noqa: F401 (a fixture)
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError

HEADS, KV_HEADS, HEAD, SIZE, BLOCKS = 4, 2, 16, 8, 12
LEFT = 7.0  # what was in a tensor before a call


@pytest.fixture(scope="module")
def ops() -> OpModule:
    return OpModule("ragged_device_ops")


class Batch(NamedTuple):
    """Sequences of (new, seen) tokens with two tokens of padding, as FastGen describes them."""

    sequences: list[tuple[int, int]]
    batch_metadata: Tensor
    seq_metadata: Tensor
    tokens_to_seq: Tensor
    kv_ptrs: Tensor
    lists: Tensor  # the blocks of each sequence

    @property
    def described(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.batch_metadata, self.seq_metadata, self.tokens_to_seq, self.kv_ptrs

    @property
    def tokens(self) -> int:
        """Without padding."""
        return sum(new for new, _ in self.sequences)

    @property
    def positions(self) -> list[tuple[int, int]]:
        """The sequence of each token and its place there."""
        return [
            (row, seen + i) for row, (new, seen) in enumerate(self.sequences) for i in range(new)
        ]

    def places(self) -> list[tuple[int, int]]:
        """The block and the place in it of each token."""
        return [(int(self.lists[row, at // SIZE]), at % SIZE) for row, at in self.positions]


def batch() -> Batch:
    sequences, start, described, owners = [(5, 0), (1, 19), (9, 3), (1, 0)], 0, [], []
    for row, (new, seen) in enumerate(sequences):
        described.append([start, new, seen, 0])
        owners += [row] * new
        start += new
    lists = torch.randperm(BLOCKS).int().view(4, 3)
    return Batch(
        sequences, torch.tensor([start, 4]).int(), torch.tensor(described).int(),
        torch.tensor([*owners, -1, -1]).int(),
        torch.tensor([row.data_ptr() for row in lists]), lists,
    )  # fmt: skip


def qkv(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of the rows of one tensor."""
    whole = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD).to(dtype)
    sizes = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
    q, k, v = whole.split(sizes, 1)
    return q, k, v


def new_cache(dtype: torch.dtype) -> Tensor:
    return torch.full((BLOCKS, SIZE, 2, KV_HEADS, HEAD), LEFT, dtype=dtype)


def written(cache: Tensor, of: Batch) -> Tensor:
    """What the cache has of each token. Nothing else may have been written."""
    cache = cache.clone()
    found = []
    for block, place in of.places():
        found.append(cache[block, place].clone())
        cache[block, place] = LEFT
    assert (cache == LEFT).all()
    return torch.stack(found)


def turned(x: Tensor, of: Batch, angles: Tensor) -> Tensor:
    """Heads rotated by ``angles``, [pairs], at their positions, in float64."""
    pairs = len(angles)
    at = torch.tensor([place for _, place in of.positions], dtype=torch.float64)
    wide = x[: of.tokens].double().unflatten(1, (-1, HEAD))
    z = torch.complex(wide[..., :pairs], wide[..., pairs : 2 * pairs])
    z = z * torch.exp(1j * at[:, None, None] * angles.double())
    return torch.cat((z.real, z.imag, wide[..., 2 * pairs :]), -1)


DTYPES = [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize("padding", [2, 40])  # rows; the batch describes two
@pytest.mark.parametrize(("dtype", "near"), DTYPES)
def test_keys_and_values_are_written_to_listed_blocks(
    ops: OpModule, dtype: torch.dtype, near: float, padding: int
) -> None:
    of, cache = batch(), new_cache(dtype)
    q, k, v = qkv(of.tokens + padding, dtype)
    before = q.clone()
    ops.linear_kv_copy(cache, q, k, v, *of.described)
    found = written(cache, of)
    assert torch.equal(found[:, 0].flatten(1), k[: of.tokens])
    assert torch.equal(found[:, 1].flatten(1), v[: of.tokens])
    assert torch.equal(q, before)
    theta = (10000.0 ** -(torch.arange(6).double() / 6)).to(dtype)  # as DeepSpeed rounds them
    trained = torch.rand(6)
    for angles, call, words in (
        (theta, ops.kv_rotary_embeddings, (12, 10000.0)),
        (trained, ops.kv_trained_rotary_embeddings, (trained,)),
    ):
        q, k, v = qkv(of.tokens + padding, dtype)
        cache, queries, keys = new_cache(dtype), q.clone(), k.clone()
        call(cache, q, k, v, *words, *of.described)
        found = written(cache, of)
        expected = turned(queries, of, angles).flatten(1)
        torch.testing.assert_close(q[: of.tokens].double(), expected, rtol=near, atol=near)
        assert torch.equal(q[of.tokens :], queries[of.tokens :])
        torch.testing.assert_close(
            found[:, 0].double(), turned(k, of, angles), rtol=near, atol=near
        )
        assert torch.equal(k, keys)
        assert torch.equal(found[:, 1].flatten(1), v[: of.tokens])


def test_trained_frequencies_must_be_fp32(ops: OpModule) -> None:
    of = batch()
    with pytest.raises(UsageError, match=r"inv_freq is torch\.float16"):
        ops.kv_trained_rotary_embeddings(
            new_cache(torch.float16), *qkv(of.tokens + 2, torch.float16), torch.rand(6).half(),
            *of.described,
        )  # fmt: skip


@pytest.mark.parametrize("q_block", [4, 128])
@pytest.mark.parametrize(("dtype", "near"), DTYPES)
def test_attention_by_atoms_sees_the_whole_of_each_sequence(
    ops: OpModule, dtype: torch.dtype, near: float, q_block: int
) -> None:
    of = batch()
    cache = torch.randn(BLOCKS, SIZE, 2, KV_HEADS, HEAD).to(dtype)
    q = torch.randn(of.tokens + 2, HEADS * HEAD).to(dtype)
    atoms = torch.full((20, 8), 99, dtype=torch.int32)
    count = ops.build_atoms(atoms, of.batch_metadata, of.seq_metadata, of.kv_ptrs, q_block, SIZE)
    assert count == (7 if q_block == 4 else 4)
    assert (atoms[count:] == 99).all()
    assert torch.equal(atoms[:2, :2].contiguous().view(torch.int64)[0], of.kv_ptrs[:1])
    if q_block == 4:
        expected = [[0, 4, 1, 4, 0], [4, 1, 1, 5, 4], [5, 1, 3, 20, 19], [6, 4, 1, 7, 3]]
        assert atoms[:4, 2:7].tolist() == expected
    out = torch.full_like(q, LEFT)
    ops.flash_attn_by_atoms(out, q, cache[:, :, 0], cache[:, :, 1], atoms[:count], 0.3, True)
    assert (out[of.tokens :] == LEFT).all()
    for token, (row, at) in enumerate(of.positions):
        seen = cache[of.lists[row].long()].flatten(0, 1)[: at + 1].double()
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in seen.unbind(1))
        shares = (torch.einsum("hd,khd->hk", q[token].double().view(HEADS, HEAD), k) * 0.3).softmax(
            1
        )
        expected = torch.einsum("hk,khd->hd", shares, v).flatten()
        torch.testing.assert_close(out[token].double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_embedding_leaves_padding_and_unknown_tokens_alone(ops: OpModule, ids: torch.dtype) -> None:
    of = batch()
    words, places = torch.randn(30, 8), torch.randn(21, 8)
    tokens = torch.randint(30, (of.tokens + 2,)).to(ids)
    tokens[3], tokens[-2:] = 30, -1
    for weight, offset in ((None, 0), (places, 2)):
        out = torch.full((of.tokens + 2, 8), LEFT)
        ops.ragged_embed(out, tokens, words, weight, offset, *of.described)
        for token, (_, at) in enumerate(of.positions):
            if token == 3:
                assert (out[token] == LEFT).all()
                continue
            expected = words[tokens[token]]
            if weight is not None:
                expected = expected + weight[min(at + offset, 20)]
            torch.testing.assert_close(out[token], expected)
        assert (out[of.tokens :] == LEFT).all()


def test_the_last_tokens_are_gathered(ops: OpModule) -> None:
    of = batch()
    x, out = torch.randn(of.tokens + 2, 8), torch.full((4, 8), LEFT)
    of.batch_metadata[1] = 3  # the fourth row is padding
    ops.gather_for_logits(out, x, of.batch_metadata, of.seq_metadata)
    assert torch.equal(out[:3], x[[4, 5, 14]])
    assert (out[3] == LEFT).all()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_tokens_go_to_experts_and_back(ops: OpModule, k: int, normalize: bool) -> None:
    of, experts, wide = batch(), 5, 16
    tokens = of.tokens + 2
    logits, x = torch.randn(tokens, experts), torch.randn(tokens, wide)
    counts = torch.tensor([0, 2, 0, 0, 1], dtype=torch.int32)  # are added to
    scores = torch.full((tokens, k), LEFT)
    assignments, offsets, slots = (torch.full((tokens, k), 50, dtype=torch.int32) for _ in range(3))
    ops.top_k_gating(counts, scores, assignments, offsets, logits, of.batch_metadata)
    shares, chosen = logits[: of.tokens].softmax(1).topk(k)
    assert torch.equal(assignments[: of.tokens].long(), chosen)
    torch.testing.assert_close(scores[: of.tokens], shares)
    for padded in (assignments, offsets):
        assert (padded[of.tokens :] == -1).all()
    assert (scores[of.tokens :] == LEFT).all()
    begun = torch.tensor([0, 2, 0, 0, 1])
    assert torch.equal(counts.long(), chosen.flatten().bincount(minlength=experts) + begun)
    for expert in range(experts):
        mine = offsets[: of.tokens][chosen == expert].tolist()
        assert mine == list(range(int(begun[expert]), int(counts[expert])))

    counts -= begun.int()
    offsets[: of.tokens] -= begun.int()[chosen]
    rows, sums = torch.full((tokens * k, wide), LEFT), torch.empty(experts, dtype=torch.int64)
    ops.moe_scatter(rows, sums, slots, x, counts, assignments, offsets)
    assert torch.equal(sums, counts.long().cumsum(0))
    assert torch.equal(rows[slots[: of.tokens].long()], x[: of.tokens, None].expand(-1, k, -1))
    assert (slots[of.tokens :] == -1).all()
    assert (rows[of.tokens * k :] == LEFT).all()
    assert slots[: of.tokens].flatten().sort().values.tolist() == list(range(of.tokens * k))

    out = torch.full((tokens, wide), LEFT)
    ops.moe_gather(out, rows * 2, scores, slots, counts, normalize)
    factor = shares / shares.sum(1, keepdim=True) if normalize else shares
    torch.testing.assert_close(out[: of.tokens], 2 * x[: of.tokens] * factor.sum(1, keepdim=True))
    assert (out[of.tokens :] == LEFT).all()
    assert (counts == 0).all()


def test_host_buffers_and_views_of_them() -> None:
    host = OpModule("ragged_ops")
    made = host.allocate_fast_host_buffer(torch.empty(3, 4, dtype=torch.int64))
    assert (made.shape, made.dtype, made.device.type) == ((3, 4), torch.int64, "cpu")
    buffer = torch.arange(32, dtype=torch.int32)
    view = host.allocate_view_on(torch.empty(3, 2, dtype=torch.int32), buffer[1:], 8)
    assert view.tolist() == [[3, 4], [5, 6], [7, 8]]
    view[0, 0] = -1
    assert buffer[3] == -1
    other = host.allocate_view_like((2, 2), (4, 1), torch.empty(0, dtype=torch.int64), buffer, 64)
    assert other.dtype == torch.int64
    assert other.data_ptr() == buffer.data_ptr() + 64
    assert other.stride() == (4, 1)
    with pytest.raises(UsageError, match="multiple of 8 bytes"):
        host.allocate_view_like((1,), (1,), torch.empty(0, dtype=torch.int64), buffer, 4)
