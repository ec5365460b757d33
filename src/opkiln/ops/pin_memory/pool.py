"""``PinnedPool``: page-locked host buffers that are used again instead of being locked anew."""

from __future__ import annotations

import mmap
import warnings
import weakref
from contextlib import contextmanager, suppress
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from opkiln.base import forks
from opkiln.errors import ArgumentError, FallbackWarning, UsageError
from opkiln.ops.pin_memory import functions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_HUGE = 2 << 20


class PoolCounts(NamedTuple):
    """What a pool holds, and how often it could give what it had."""

    buffers: int  # all that the pool holds
    bytes: int  # of all buffers
    taken: int  # buffers that were taken and not given back
    taken_bytes: int  # of those buffers
    locked_bytes: int  # of buffers that are page-locked
    reused: int  # takes that were served by a buffer that was there
    made: int  # takes that made one


class _Buffer:
    """One stretch of memory, on whole pages of its own."""

    def __init__(self, size: int, alignment: int) -> None:
        # Not a part of a larger tensor: whether one is pinned, torch asks of where its storage
        # starts. The mapping goes when the last tensor on it does.
        # Private: Python's default is memory that a forked process would share.
        length = size + alignment - mmap.PAGESIZE
        pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):  # less work for direct I/O
            with suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % alignment
        self.memory = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=start)
        self.locked = False
        self.after: torch.cuda.Event | None = None  # the device may use it until then

    def ready(self) -> bool:
        return self.after is None or bool(self.after.query())  # type: ignore[no-untyped-call]


class PinnedPool:
    """Page-locked host memory for copies to and from a device, and for direct I/O.

        pool = PinnedPool("cuda")
        with pool.borrow((1024, 1024), torch.float16) as staged:
            ...

    ``device`` is the one that copies. Where torch can use no GPU it is the CPU. Where a GPU was
    asked for all the same, a FallbackWarning says so. Every buffer starts at a multiple of
    ``alignment`` bytes and has pages of its own. ``limit`` bounds the bytes that the pool holds.
    Pages that the system does not lock (``ulimit -l``) are used as they are and counted as not
    locked, unless ``lock=True``, which raises UsageError; ``lock=False`` does not try.

    Any thread may take and give back. A buffer that is given back is not handed out again before
    the device has done what was enqueued on the current stream until then. Raises UsageError for an
    alignment that is no power of two.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        *,
        alignment: int = 4096,
        limit: int | None = None,
        lock: bool | None = None,
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ArgumentError(f"alignment is {alignment}, expected a power of two")
        if limit is not None and limit < 0:
            raise ArgumentError(f"limit is {limit}, expected at least 0 bytes")
        self.device = _device(device)
        self.alignment = max(alignment, mmap.PAGESIZE)
        self.limit = limit
        self._lock_pages = lock
        self._guard = forks.lock()
        self._free: list[_Buffer] = []
        self._taken: dict[int, _Buffer] = {}  # by address
        self._reused = self._made = 0
        self._closed = False
        # A pool that is dropped must not leave pages locked that torch then hands to others.
        self._finalizer = weakref.finalize(self, _drop, self._free, self._taken, self.device)

    def take(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A tensor of this shape in a buffer of the pool; what it holds is whatever was there.

        Raises UsageError where the pool is closed or would hold more than its limit.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise ArgumentError(f"shape is {sizes}, expected no negative size")
        wanted = prod(sizes) * dtype.itemsize
        with self._guard:
            if self._closed:
                raise UsageError("the pool is closed")
            buffer = self._find(wanted) or self._new(wanted)
            self._taken[_address(buffer.memory)] = buffer
        return buffer.memory[:wanted].view(dtype).view(sizes)

    def give(self, tensor: Tensor) -> None:
        """Take back a tensor that ``take`` gave. It must not be used any more.

        Raises UsageError for one that is not this pool's, or was given back before.
        """
        with self._guard:
            buffer = self._taken.pop(_address(tensor), None)
            if buffer is None:
                raise UsageError(
                    "the tensor is not one that was taken from this pool and not yet given back",
                    why="a view that starts elsewhere does not stand for the whole",
                )
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    buffer.after = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    buffer.after.record()
            self._free.append(buffer)

    @contextmanager
    def borrow(
        self, shape: Sequence[int] | int, dtype: torch.dtype = torch.uint8
    ) -> Iterator[Tensor]:
        """``take``, and ``give`` at the end of the block."""
        tensor = self.take(shape, dtype)
        try:
            yield tensor
        finally:
            self.give(tensor)

    def counts(self) -> PoolCounts:
        """What the pool holds now."""
        with self._guard:
            taken = list(self._taken.values())
            every = [*self._free, *taken]
            return PoolCounts(
                buffers=len(every),
                bytes=sum(buffer.memory.numel() for buffer in every),
                taken=len(taken),
                taken_bytes=sum(buffer.memory.numel() for buffer in taken),
                locked_bytes=sum(buffer.memory.numel() for buffer in every if buffer.locked),
                reused=self._reused,
                made=self._made,
            )

    def trim(self) -> int:
        """Give the memory of all buffers that nobody has back to the system; how many bytes."""
        with self._guard:
            freed = sum(buffer.memory.numel() for buffer in self._free)
            _drop(self._free, {}, self.device)
            return freed

    def close(self) -> None:
        """``trim``, and no more buffers. Closing twice does nothing.

        Raises UsageError where buffers are still taken: a device may be copying from them.
        """
        with self._guard:
            if self._taken:
                raise UsageError(
                    f"{len(self._taken)} buffers of the pool are still taken",
                    hint="pool.give(tensor) for each of them",
                )
            self._closed = True
        self.trim()

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self._taken:  # what went wrong in the block is the better news
            self.close()

    def _find(self, wanted: int) -> _Buffer | None:
        """The smallest free buffer that is large enough and not far too large."""
        most = wanted + wanted // 4 + self.alignment
        fitting = (b for b in self._free if wanted <= b.memory.numel() <= most and b.ready())
        best = min(fitting, key=lambda buffer: buffer.memory.numel(), default=None)
        if best is not None:
            self._free.remove(best)
            best.after = None
            self._reused += 1
        return best

    def _new(self, wanted: int) -> _Buffer:
        size = max(1, -(-wanted // mmap.PAGESIZE)) * mmap.PAGESIZE
        if self.limit is not None:
            self._make_room(size)
        buffer = _Buffer(size, self.alignment)
        if self._lock_pages is not False:
            try:
                functions.lock_pages_(buffer.memory, _like(self.device))
                buffer.locked = True
            except RuntimeError as error:
                if self._lock_pages or self.device.type == "cuda":
                    raise UsageError(
                        str(error).splitlines()[0],
                        why="the limit on locked memory may be too small: see ulimit -l",
                        hint="ulimit -l unlimited",
                    ) from error
        self._made += 1
        return buffer

    def _make_room(self, size: int) -> None:
        """Free buffers that nobody has make room for one of another size."""
        assert self.limit is not None
        held = sum(b.memory.numel() for b in (*self._free, *self._taken.values()))
        while held + size > self.limit and self._free:
            oldest = self._free.pop(0)
            _unlock(oldest, self.device)
            held -= oldest.memory.numel()
        if held + size > self.limit:
            raise UsageError(
                f"the pool holds {held} bytes of at most {self.limit}, and {size} more are asked "
                "for",
                hint="pool.give(tensor) for what is no longer used",
            )


def _device(asked: torch.device | str | int | None) -> torch.device:
    """The one that was asked for; the CPU in place of a GPU that torch cannot use."""
    gpu = torch.cuda.is_available()
    if asked is None:
        return torch.device("cuda" if gpu else "cpu")
    # torch.device(0) raises where there is no GPU.
    device = torch.device(f"cuda:{asked}" if isinstance(asked, int) else asked)
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device is {device}, expected cpu or cuda")
    if device.type == "cuda" and not gpu:
        warnings.warn(
            f"PinnedPool({str(device)!r}): torch can use no GPU here, so buffers are page-aligned "
            "memory that is locked for the CPU alone",
            FallbackWarning,
            stacklevel=3,
        )
        return torch.device("cpu")
    return device


def _address(tensor: Tensor) -> int:
    """Of its first element, also where it has none: data_ptr() is then 0."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage().data_ptr() + start


def _unlock(buffer: _Buffer, device: torch.device) -> None:
    if buffer.after is not None:
        buffer.after.synchronize()
        buffer.after = None
    if buffer.locked:
        functions.unlock_pages_(buffer.memory, _like(device))
        buffer.locked = False


def _drop(free: list[_Buffer], taken: dict[int, _Buffer], device: torch.device) -> None:
    # Tensors of taken buffers may live on; their pages are ordinary memory from here on.
    for buffer in (*free, *taken.values()):
        _unlock(buffer, device)
    free.clear()
    taken.clear()


def _like(device: torch.device) -> Tensor:
    """A tensor by which the dispatcher knows the device."""
    return torch.empty(0, device=device)
