"""``RaggedBatch``: what kernels must know of a ragged batch, in one pinned buffer."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.ops.checks import call_checked, check_least

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Sequenced(NamedTuple):
    """A sequence of the batch: its new tokens, and what the cache has of it."""

    tokens: Sequence[int] | Tensor  # new ones
    seen: int = 0  # tokens that are in the cache already
    blocks: Sequence[int] = ()  # of the cache, in order, with room for all tokens


class RaggedViews(NamedTuple):
    """The parts of the buffer: int32 tensors that share its memory.

    B is the most sequences and T the most tokens of a batch. Rows behind the last sequence have no
    tokens, and the tokens behind the last are padding: their sequence is -1. So kernels may run on
    the whole of each view, also in a CUDA graph that is replayed for another batch.
    """

    counts: Tensor  # [2]: sequences and tokens
    starts: Tensor  # [B]: the first new token
    lengths: Tensor  # [B]: new tokens
    seen: Tensor  # [B]: tokens before them
    block_table: Tensor  # [B, blocks of a sequence]; -1 where there is none
    tokens: Tensor  # [T]: their ids
    sequences: Tensor  # [T]: the sequence of each
    positions: Tensor  # [T]: the place of each in its sequence


class RaggedBatch:
    """Descriptors of a batch of sequences, on the host and on a device.

        batch = RaggedBatch(most_sequences=64, most_tokens=2048, most_blocks=32, block_size=128)
        batch.pack([Sequenced([5, 17], seen=30, blocks=[4]), Sequenced([9], blocks=[7])])
        views = batch.to_device()

    All parts lie in one buffer, so that a batch takes one copy to the device. The buffer is pinned
    if ``device`` is a GPU. Two are used in turn: ``pack`` may be called again while the last batch
    is still being copied, and waits for the one before that. Each part begins at a multiple of 16
    bytes. Not for several threads at once.
    """

    def __init__(
        self,
        most_sequences: int,
        most_tokens: int,
        most_blocks: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """``most_blocks`` are those of one sequence. Raises UsageError."""
        call_checked(
            check_least, 1, most_sequences=most_sequences, most_tokens=most_tokens,
            most_blocks=most_blocks, block_size=block_size,
        )  # fmt: skip
        self.block_size = block_size
        self.device = torch.device(device)
        rows, tokens = (most_sequences,), (most_tokens,)
        self._shapes: tuple[tuple[int, ...], ...] = (  # of RaggedViews
            (2,), rows, rows, rows, (most_sequences, most_blocks), tokens, tokens, tokens,
        )  # fmt: skip
        gpu = self.device.type == "cuda"
        size = sum(_pad(shape) for shape in self._shapes)
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=gpu) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._packed = (0, 0)
        self._on_device = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._device_views = self._views_of(self._on_device)
        self.pack([])

    @property
    def views(self) -> RaggedViews:
        """The whole of each part, on the host. The next ``pack`` but one writes over them."""
        return self._views_of(self._buffers[self._turn])

    @property
    def sequences(self) -> int:
        """How many the last ``pack`` was given."""
        return self._packed[0]

    @property
    def tokens(self) -> int:
        """How many new tokens the last ``pack`` was given."""
        return self._packed[1]

    def pack(self, batch: Sequence[Sequenced]) -> None:
        """Describe these sequences, in their order. Raises UsageError, and then changes nothing."""
        ids = self._check(batch)
        self._turn = 1 - self._turn
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        views = self.views
        count = len(batch)
        lengths = torch.tensor([len(each.tokens) for each in batch], dtype=torch.int32)
        total = int(lengths.sum())
        starts = lengths.cumsum(0, dtype=torch.int32) - lengths
        views.starts.zero_()[:count] = starts
        views.lengths.zero_()[:count] = lengths
        views.seen.zero_()
        views.block_table.fill_(-1)
        for row, each in enumerate(batch):
            views.seen[row] = each.seen
            views.block_table[row, : len(each.blocks)] = torch.tensor(
                each.blocks, dtype=torch.int32
            )
        views.tokens[:total] = ids
        views.tokens[total:] = 0
        owners = torch.arange(count, dtype=torch.int32).repeat_interleave(lengths)
        views.sequences[:total] = owners
        views.sequences[total:] = -1
        first = views.seen[:count] - starts
        views.positions[:total] = torch.arange(total, dtype=torch.int32) + first[owners]
        views.positions[total:] = 0
        views.counts[0], views.counts[1] = count, total
        self._packed = (count, total)

    def to_device(self) -> RaggedViews:
        """The parts on the device, after one copy on the current stream.

        They are the same tensors every time, so that a CUDA graph may read them. On the CPU they
        are copies, too.
        """
        self._on_device.copy_(self._buffers[self._turn], non_blocking=True)
        if self.device.type == "cuda":
            event = self._copied[self._turn]
            if event is None:
                event = self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
        return self._device_views

    def _views_of(self, buffer: Tensor) -> RaggedViews:
        parts, at = [], 0
        for shape in self._shapes:
            parts.append(buffer[at : at + prod(shape)].view(shape))
            at += _pad(shape)
        return RaggedViews(*parts)

    def _check(self, batch: Sequence[Sequenced]) -> Tensor:
        """The ids of all tokens. Raises UsageError."""
        views = self._device_views
        most_sequences, most_blocks = views.block_table.shape
        most_tokens = len(views.tokens)
        if len(batch) > most_sequences:
            raise ArgumentError(
                f"there are {len(batch)} sequences, expected at most {most_sequences}"
            )
        total = sum(len(each.tokens) for each in batch)
        if total > most_tokens:
            raise ArgumentError(f"there are {total} new tokens, expected at most {most_tokens}")
        ids = [torch.empty(0, dtype=torch.int32)]
        for row, each in enumerate(batch):
            if not isinstance(each.seen, int) or each.seen < 0:
                raise ArgumentError(
                    f"sequence {row} has seen {each.seen} tokens, expected a whole number from 0 on"
                )
            needed = -(-(each.seen + len(each.tokens)) // self.block_size)
            if not needed <= len(each.blocks) <= most_blocks:
                raise ArgumentError(
                    f"sequence {row} has {len(each.blocks)} blocks, expected {needed} to "
                    f"{most_blocks}",
                    why=f"it has {each.seen} tokens and {len(each.tokens)} new ones, and a block "
                    f"has room for {self.block_size}",
                )
            if not all(isinstance(block, int) and 0 <= block < _MOST for block in each.blocks):
                raise ArgumentError(
                    f"sequence {row} has blocks {list(each.blocks)}, expected numbers from 0 on"
                )
            if len(each.tokens):
                ids.append(torch.as_tensor(each.tokens))
                if ids[-1].dtype not in _WHOLE:
                    raise ArgumentTypeError(
                        f"sequence {row} has tokens of {ids[-1].dtype}, expected whole numbers"
                    )
        found = torch.cat(ids)
        if total and not 0 <= int(found.min()) <= int(found.max()) < _MOST:
            raise ArgumentError(
                f"the tokens are from {int(found.min())} to {int(found.max())}, expected 0 to "
                f"{_MOST - 1}"
            )
        return found


_MOST = 2**31
_WHOLE = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def _pad(shape: tuple[int, ...]) -> int:
    """The elements of a part, up to the next multiple of 16 bytes."""
    return -(-prod(shape) // 4) * 4
