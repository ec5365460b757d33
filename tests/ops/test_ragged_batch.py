"""``RaggedBatch``: descriptors of ragged batches in one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opkiln.errors import UsageError
from opkiln.nn.ragged import RaggedBatch, Sequenced, logits_gather, paged_kv_copy, ragged_embedding


@pytest.fixture
def batch() -> RaggedBatch:
    return RaggedBatch(most_sequences=4, most_tokens=9, most_blocks=3, block_size=4)


TWO = (Sequenced([5, 17, 2], seen=6, blocks=[8, 1, 3]), Sequenced(torch.tensor([9]), blocks=[7]))


def test_a_batch_is_packed_and_the_rest_is_padding(batch: RaggedBatch) -> None:
    batch.pack(TWO)
    assert (batch.sequences, batch.tokens) == (2, 4)
    for views in (batch.views, batch.to_device()):
        assert {name: part.tolist() for name, part in views._asdict().items()} == {
            "counts": [2, 4],
            "starts": [0, 3, 0, 0],
            "lengths": [3, 1, 0, 0],
            "seen": [6, 0, 0, 0],
            "block_table": [[8, 1, 3], [7, -1, -1], [-1] * 3, [-1] * 3],
            "tokens": [5, 17, 2, 9, 0, 0, 0, 0, 0],
            "sequences": [0, 0, 0, 1, -1, -1, -1, -1, -1],
            "positions": [6, 7, 8, 0, 0, 0, 0, 0, 0],
        }


def test_all_parts_lie_in_one_buffer_at_multiples_of_16_bytes(batch: RaggedBatch) -> None:
    for views in (batch.views, batch.to_device()):
        buffer = {part.untyped_storage().data_ptr() for part in views}
        assert len(buffer) == 1
        assert all(part.dtype == torch.int32 and part.is_contiguous() for part in views)
        assert all((part.data_ptr() - views[0].data_ptr()) % 16 == 0 for part in views)


def test_the_next_batch_leaves_nothing_of_the_last(batch: RaggedBatch) -> None:
    batch.pack(TWO)
    held = batch.views
    device = batch.to_device()
    batch.pack([])
    assert held.tokens.tolist()[:4] == [5, 17, 2, 9]  # what a copy may still read
    assert batch.to_device() is device
    fresh = RaggedBatch(4, 9, 3, 4).to_device()
    assert all(torch.equal(mine, other) for mine, other in zip(device, fresh, strict=True))
    batch.pack([Sequenced([], seen=3, blocks=[2]), Sequenced([1, 1], blocks=[0])])
    views = batch.to_device()
    assert views.sequences.tolist()[:3] == [1, 1, -1]
    assert views.positions.tolist()[:2] == [0, 1]


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("there are 5 sequences, expected at most 4", [Sequenced([])] * 5),
        ("there are 10 new tokens, expected at most 9", [Sequenced(range(10), blocks=[1, 2, 3])]),
        ("sequence 1 has 1 blocks, expected 2 to 3", [*TWO[1:], Sequenced([1], 4, [1])]),
        ("sequence 0 has 4 blocks, expected 0 to 3", [Sequenced([], 0, [1, 2, 3, 4])]),
        ("sequence 0 has seen -1 tokens", [Sequenced([1], -1, [1])]),
        ("sequence 0 has seen 1.5 tokens", [Sequenced([1], 1.5, [1])]),
        (r"sequence 0 has blocks \[-1\]", [Sequenced([1], 0, [-1])]),
        (r"sequence 0 has blocks \[1.5\]", [Sequenced([1], 0, [1.5])]),
        ("sequence 0 has tokens of torch.float32", [Sequenced([1.5], 0, [1])]),
        ("sequence 0 has tokens of torch.bool", [Sequenced(torch.ones(1) > 0, 0, [1])]),
        ("the tokens are from -1 to -1", [Sequenced([-1], 0, [1])]),
        ("the tokens are from 2147483648", [Sequenced([2**31], 0, [1])]),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing(
    batch: RaggedBatch, message: str, given: list[Any]
) -> None:
    batch.pack(TWO)
    before = [part.clone() for part in batch.views]
    with pytest.raises(UsageError, match=message):
        batch.pack(given)
    assert all(torch.equal(old, new) for old, new in zip(before, batch.views, strict=True))
    with pytest.raises(UsageError, match="block_size is 0"):
        RaggedBatch(1, 1, 1, 0)


@pytest.mark.filterwarnings("ignore::opkiln.errors.FallbackWarning")
def test_the_functions_take_the_whole_views(batch: RaggedBatch) -> None:
    batch.pack(TWO)
    views = batch.to_device()
    table = torch.randn(20, 8)
    x = ragged_embedding(views.tokens, table)
    cache, other = torch.zeros(2, 10, 4, 2, 4)
    k = x.view(9, 2, 4)
    paged_kv_copy(k, k, cache, other, views.block_table, views.sequences, views.positions)
    assert torch.equal(cache[1, 2:].flatten(1), table[[5, 17]])
    assert torch.equal(cache[3, 0].flatten(), table[2])
    assert torch.equal(cache[7, 0].flatten(), table[9])
    assert (cache != 0).sum() == 4 * 8
    last = logits_gather(x, views.starts, views.lengths)
    assert torch.equal(last[:2], table[[2, 9]])
    assert (last[2:] == 0).all()
