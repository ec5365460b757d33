"""A layout as the kernels on GPUs take it: lists of tiles, cut into shares of work.

A tile is 64 keys by 128 queries in the forward pass, and 64 by 64 in the backward pass. The rows of
a list are tiles of queries, or for the gradients of keys and values tiles of keys; a **line** is
what one row of one head's layout has to look at. A list is three int32 tensors:

- ``tiles`` [count, 2]: the number of the tile along the line, and a bit for each 16 by 16 tokens of
  it that are seen: bit ``4 * (row's sixteenth) + (column's sixteenth)``. So layouts with small
  blocks need no mask.
- ``shares`` [count, 4]: the line, the first of its tiles in ``tiles`` and the end of them, and a
  slot. A block of the GPU works on one share. Long lines, as those of global blocks, are cut into
  several shares: each leaves its sum in its slot, and ``joined`` says what is to be added. A line
  that is not cut has the slot -1. The longest shares come first.
- ``joined`` [count, 4]: a line that was cut, its first slot, how many there are, and 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opkiln.ops.checks import runs_cuda_kernels
from opkiln.ops.sparse_attn.op import forward

COLUMNS = 64  # tokens of a tile along a line
FORWARD_ROWS = 128
BACKWARD_ROWS = 64
_PIECE = 16  # tokens that a bit stands for
LEAST = 32  # a line of at most so many tiles is not cut,
MEANS = 4  # nor one that has at most so many times the mean: then all are long, and many


class SparsePlan(NamedTuple):
    """A layout for sequences of ``tokens`` tokens on one device."""

    seen: Tensor  # bool [heads or 1, blocks, blocks]
    lists: list[Tensor]  # of the forward pass; of the backward pass by queries; and by keys
    block: int  # tokens of a block
    tokens: int  # of a sequence
    causal: bool  # whether a query sees no later key
    window: int  # a query sees keys less than so many tokens away; 0: no limit


def plan_of(seen: Tensor, block: int, tokens: int, causal: bool, window: int) -> SparsePlan:
    """The plan of a layout. On the CPU, whose kernels read the layout itself, it has no lists."""
    seen, lists = seen.contiguous(), []
    if runs_cuda_kernels(seen, forward.builder):
        lists = lists_of(seen, block, tokens)
    return SparsePlan(seen, lists, block, tokens, causal, window)


def lists_of(seen: Tensor, block: int, tokens: int) -> list[Tensor]:
    """The nine tensors of a plan's lists."""
    return [
        *_list_tiles(seen, block, tokens, FORWARD_ROWS),
        *_list_tiles(seen, block, tokens, BACKWARD_ROWS),
        *_list_tiles(seen.mT, block, tokens, BACKWARD_ROWS),
    ]


def _list_tiles(seen: Tensor, block: int, tokens: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    bits = _bits(seen, block, tokens, rows)
    line, column = bits.nonzero(as_tuple=True)
    # int32 has 32 bits, the last of them its sign.
    tiles = torch.stack([column, _to_signed(bits[line, column])], 1).int()
    lengths = (bits != 0).sum(1)
    shares, joined = _shares(lengths)
    return shares, tiles, joined


def _bits(seen: Tensor, block: int, tokens: int, rows: int) -> Tensor:
    """The bits of each tile: int64 [lines, tiles along a line]."""
    heads = seen.shape[0]
    down, across = -(-tokens // rows), -(-tokens // COLUMNS)
    # The blocks of a tile, or a block for each of the tiles that it covers.
    down_blocks, across_blocks = max(rows // block, 1), max(COLUMNS // block, 1)
    down_tiles, across_tiles = max(block // rows, 1), max(block // COLUMNS, 1)
    whole = seen.new_zeros(heads, down * down_blocks, across * across_blocks)
    spread = seen.repeat_interleave(down_tiles, 1).repeat_interleave(across_tiles, 2)
    spread = spread[:, : whole.shape[1], : whole.shape[2]]
    whole[:, : spread.shape[1], : spread.shape[2]] = spread
    whole = whole.view(heads, down, down_blocks, across, across_blocks)
    down_bits, across_bits = rows // _PIECE, COLUMNS // _PIECE
    values = torch.tensor(
        [[1 << (across_bits * i + j) for j in range(across_bits)] for i in range(down_bits)],
        device=seen.device,
    )
    values = values.view(down_blocks, down_bits // down_blocks, across_blocks, -1).sum((1, 3))
    return (whole * values[:, None]).sum((2, 4)).view(heads * down, across)


def _shares(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The shares and what is joined, for lines of so many tiles."""
    device = lengths.device
    lines = torch.arange(len(lengths), device=device)
    begin = lengths.cumsum(0) - lengths
    most = lengths.sum().mul(MEANS).div(max(len(lengths), 1)).ceil().clamp(min=LEAST).long()
    parts = ((lengths + most - 1) // most).clamp(min=1)
    line = lines.repeat_interleave(parts)
    number = torch.arange(len(line), device=device) - (parts.cumsum(0) - parts)[line]
    size = ((lengths + parts - 1) // parts)[line]
    first = begin[line] + torch.minimum(number * size, lengths[line])
    end = begin[line] + torch.minimum((number + 1) * size, lengths[line])
    cut = parts > 1
    slots = torch.where(cut, parts, 0)
    first_slot = slots.cumsum(0) - slots
    slot = torch.where(cut[line], first_slot[line] + number, -1)
    order = (end - first).argsort(descending=True, stable=True)
    shares = torch.stack([line, first, end, slot], 1)[order].int()
    joined = torch.stack([lines, first_slot, slots, torch.zeros_like(lines)], 1)[cut].int()
    return shares, joined


def _to_signed(x: Tensor) -> Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x)
