"""Layouts: which block of queries sees which block of keys. They are built with torch on the device
where they are used, and a layout keeps what it has built.

The parameters are those of DeepSpeed's ``SparsityConfig`` classes, and the blocks are the same, but
for two things. ``causal`` also holds within the blocks on the diagonal: a query sees no later key.
And random blocks are drawn from ``seed``, in the same way on every device, so all processes of a
job have the same layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.sparse_attn.plans import SparsePlan, plan_of

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = (16, 32, 64, 128)


class Layout:
    """What all layouts have. ``block`` is the number of tokens of a block: 16, 32, 64 or 128.
    ``heads`` is 1 if all heads share a layout, else the number of heads. Raises UsageError."""

    # What the layouts are made of, besides what a class adds in ``_mark``.
    _near: int | None = None  # all see the blocks that are at most so many away
    _global_parts: Sequence[slice] = ()  # that all see
    _horizontal = False  # these parts see all
    _random, _seed = 0, 0  # blocks at random that each row sees

    def __init__(
        self, block: int = 64, *, heads: int = 1, causal: bool = False, window: int = 0
    ) -> None:
        if block not in BLOCKS:
            raise ArgumentError(f"block is {block}, expected {', '.join(map(str, BLOCKS))}")
        if heads < 1:
            raise ArgumentError(f"heads is {heads}, expected at least 1")
        _check_counts(window=window)
        self.block, self.heads, self.causal, self.window = block, heads, causal, window
        self._plans: dict[tuple[int, torch.device], SparsePlan] = {}

    def blocks(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """bool [heads, count, count]: whether a block of queries sees a block of keys."""
        seen = torch.zeros(self.heads, count, count, dtype=torch.bool, device=device)
        self._mark(seen)
        return seen.tril() if self.causal else seen

    def _mark(self, seen: Tensor) -> None:
        """Set what ``blocks`` gives, but for ``causal``. All is False before."""
        if self._near is not None:
            place = torch.arange(seen.shape[1], device=seen.device)
            seen |= (place[:, None] - place).abs() <= self._near
        for part in self._global_parts:
            _see(seen, part, self._horizontal)
        if self._random:
            _see_random(seen, self._random, self._seed, self.causal)

    def plan(self, tokens: int, device: torch.device | str = "cpu") -> SparsePlan:
        """The layout for sequences of so many tokens, as the kernels take it. It is kept: the
        second call gives the same tensors. On a GPU the first one waits for the device."""
        place = torch.empty(0, device=device).device
        found = self._plans.get((tokens, place))
        if found is None:
            seen = self.blocks(-(-tokens // self.block), place)
            found = plan_of(seen, self.block, tokens, self.causal, self.window)
            self._plans[tokens, place] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # lists are built again where they are used


class Dense(Layout):
    """Every block sees every block, with ``causal`` those up to its own."""

    def _mark(self, seen: Tensor) -> None:
        seen.fill_(True)


class Blocks(Layout):
    """One's own layout: ``seen``, [heads or 1, blocks, blocks] or [blocks, blocks], is not 0 where
    a block of queries sees a block of keys. Shorter sequences use its upper left part."""

    def __init__(
        self, seen: Tensor, block: int = 64, *, causal: bool = False, window: int = 0
    ) -> None:
        seen = seen if seen.dim() == 3 else seen[None]
        if seen.dim() != 3 or seen.shape[1] != seen.shape[2]:
            raise ArgumentError(
                f"seen has shape {list(seen.shape)}, expected [heads or 1, blocks, blocks]"
            )
        super().__init__(block, heads=seen.shape[0], causal=causal, window=window)
        self.seen = seen != 0

    def _mark(self, seen: Tensor) -> None:
        count = seen.shape[1]
        if count > self.seen.shape[1]:
            raise ArgumentError(
                f"there are {count} blocks of {self.block} tokens, the layout has "
                f"{self.seen.shape[1]}"
            )
        seen.copy_(self.seen[:, :count, :count])


class SlidingWindow(Layout):
    """A query sees the keys that are less than ``window`` tokens away, exactly; with ``causal`` the
    last ``window`` tokens up to itself. ``num_sliding_window_blocks`` instead of ``window`` counts
    whole blocks, half of them on each side."""

    def __init__(
        self,
        window: int = 0,
        block: int = 64,
        *,
        num_sliding_window_blocks: int = 0,
        causal: bool = True,
    ) -> None:
        if (window > 0) == (num_sliding_window_blocks > 0):
            raise ArgumentError(
                f"window is {window} and num_sliding_window_blocks {num_sliding_window_blocks}, "
                "expected one of them, at least 1"
            )
        _check_counts(num_sliding_window_blocks=num_sliding_window_blocks)
        super().__init__(block, causal=causal, window=window)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        # A window of 2 tokens reaches the next block, one of a block and 2 the one after that.
        self._near = num_sliding_window_blocks // 2 or (window + block - 2) // block


class Fixed(Layout):
    """Local windows of ``num_local_blocks`` blocks beside each other; of each, the last
    ``num_global_blocks`` are seen by all, and with ``horizontal_global_attention`` see all. With
    ``num_different_global_patterns``, head ``h`` takes blocks further to the left, in turn."""

    def __init__(
        self,
        block: int = 64,
        *,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
        heads: int = 1,
        causal: bool = False,
    ) -> None:
        super().__init__(block, heads=heads, causal=causal)
        patterns = num_different_global_patterns
        if num_global_blocks < 1 or num_local_blocks % num_global_blocks:
            raise ArgumentError(
                f"num_local_blocks is {num_local_blocks}, expected a multiple of "
                f"num_global_blocks, {num_global_blocks}"
            )
        if not 1 <= patterns <= num_local_blocks // num_global_blocks:
            raise ArgumentError(
                f"num_different_global_patterns is {patterns}, expected 1 to "
                f"{num_local_blocks // num_global_blocks}"
            )
        if patterns > 1 and heads == 1:
            raise ArgumentError(f"there are {patterns} patterns, and heads is 1")
        _check_horizontal(horizontal_global_attention, causal)
        self.num_local_blocks, self.num_global_blocks = num_local_blocks, num_global_blocks
        self._horizontal = horizontal_global_attention
        self.num_different_global_patterns = patterns

    def _mark(self, seen: Tensor) -> None:
        count = seen.shape[1]
        window = torch.arange(count, device=seen.device) // self.num_local_blocks
        seen |= window[:, None] == window
        for head in range(self.heads):
            pattern = head % self.num_different_global_patterns
            first = self.num_local_blocks - (1 + pattern) * self.num_global_blocks
            whole = count - count % self.num_local_blocks
            starts = list(range(first, whole, self.num_local_blocks))
            if whole < count:  # the last window is shorter
                starts.append(max(0, min(whole + first, count - self.num_global_blocks)))
            for start in starts:
                part = slice(start, start + self.num_global_blocks)
                _see(seen[head], part, self._horizontal)


class Variable(Layout):
    """Local windows of ``local_window_blocks`` blocks, the last number for all that follow; blocks
    ``global_block_indices``, or from each of them up to the one in ``global_block_end_indices``,
    that all see; and ``num_random_blocks`` in each row."""

    def __init__(
        self,
        block: int = 64,
        *,
        num_random_blocks: int = 0,
        local_window_blocks: tuple[int, ...] = (4,),
        global_block_indices: tuple[int, ...] = (0,),
        global_block_end_indices: tuple[int, ...] | None = None,
        horizontal_global_attention: bool = False,
        heads: int = 1,
        causal: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(block, heads=heads, causal=causal)
        if not local_window_blocks or min(local_window_blocks) < 1:
            raise ArgumentError(
                f"local_window_blocks is {list(local_window_blocks)}, expected numbers from 1 on"
            )
        _check_horizontal(horizontal_global_attention, causal)
        _check_counts(num_random_blocks=num_random_blocks)
        self._random, self._seed = num_random_blocks, seed
        self.local_window_blocks = tuple(local_window_blocks)
        self._global_parts = _parts(global_block_indices, global_block_end_indices)
        self._horizontal = horizontal_global_attention

    def _mark(self, seen: Tensor) -> None:
        count = seen.shape[1]
        sizes = [min(each, count) for each in self.local_window_blocks]
        while sum(sizes) < count:
            sizes.append(sizes[-1])
        numbers = torch.arange(len(sizes), device=seen.device)
        window = numbers.repeat_interleave(torch.tensor(sizes, device=seen.device))[:count]
        seen |= window[:, None] == window
        super()._mark(seen)


class BigBird(Layout):
    """A window of ``num_sliding_window_blocks`` around each block, the first ``num_global_blocks``,
    which see all and are seen by all, and ``num_random_blocks`` in each row."""

    def __init__(
        self,
        block: int = 64,
        *,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        heads: int = 1,
        causal: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(block, heads=heads, causal=causal)
        _check_counts(
            num_random_blocks=num_random_blocks,
            num_sliding_window_blocks=num_sliding_window_blocks,
            num_global_blocks=num_global_blocks,
        )
        self._near = num_sliding_window_blocks // 2
        self._random, self._seed = num_random_blocks, seed
        self._global_parts, self._horizontal = [slice(0, num_global_blocks)], True


class Longformer(Layout):
    """A window of ``num_sliding_window_blocks`` around each block, and blocks
    ``global_block_indices``, or from each of them up to the one in ``global_block_end_indices``,
    which see all and are seen by all."""

    def __init__(
        self,
        block: int = 64,
        *,
        num_sliding_window_blocks: int = 3,
        global_block_indices: tuple[int, ...] = (0,),
        global_block_end_indices: tuple[int, ...] | None = None,
        heads: int = 1,
        causal: bool = False,
    ) -> None:
        super().__init__(block, heads=heads, causal=causal)
        _check_counts(num_sliding_window_blocks=num_sliding_window_blocks)
        self._near = num_sliding_window_blocks // 2
        self._global_parts = _parts(global_block_indices, global_block_end_indices)
        self._horizontal = True


def _see(seen: Tensor, part: slice, horizontal: bool) -> None:
    """All see this part; with ``horizontal`` the part sees all."""
    seen[..., part] = True
    if horizontal:
        seen[..., part, :] = True


def _parts(begin: tuple[int, ...], end: tuple[int, ...] | None) -> list[slice]:
    ends = [each + 1 for each in begin] if end is None else list(end)
    if len(ends) != len(begin) or any(b < 0 or b >= e for b, e in zip(begin, ends, strict=False)):
        raise ArgumentError(
            f"global_block_indices is {list(begin)}, global_block_end_indices {list(ends)}, "
            "expected as many ends as beginnings, each greater than its beginning"
        )
    return [slice(b, e) for b, e in zip(begin, ends, strict=True)]


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise ArgumentError(f"{name} is {count}, expected a whole number from 0 on")


def _check_horizontal(horizontal: bool, causal: bool) -> None:
    if horizontal and causal:
        raise ArgumentError(
            "horizontal_global_attention and causal exclude each other",
            why="global blocks would see later keys",
        )


def _see_random(seen: Tensor, wanted: int, seed: int, causal: bool) -> None:
    """Each row sees so many blocks at random; with ``causal`` of those up to its own, or all of
    these if they are fewer. Each block has a number that depends on seed, head, row and column,
    and the greatest numbers of a row are taken."""
    if wanted > (count := seen.shape[1]):
        raise ArgumentError(f"num_random_blocks is {wanted}, and there are {count} blocks in a row")
    place = torch.arange(seen.numel(), device=seen.device).view(seen.shape)
    numbers = _mix(place + _mix(torch.tensor(seed + 1, device=seen.device)))
    if causal:
        numbers = numbers.tril() - (1 - torch.ones_like(numbers).tril())
    seen.scatter_(-1, numbers.topk(wanted, -1).indices, True)


def _mix(x: Tensor) -> Tensor:
    """A number from 0 to 2**62 for each, without order: multiplications wrap around, and the upper
    bits are brought down."""
    for factor in (-0x61C8864680B583EB, -0x4B47D0C5A1A6DD17):
        x = x * factor
        x = x ^ (x >> 29 & (1 << 35) - 1)
    return x & (1 << 62) - 1
