"""The functions of the library; their bodies are the reference.

A queue runs requests in the background. ``aio_open`` gives its number, ``aio_read_`` and
``aio_write`` that of a request, each as a tensor of one int64. A request is a list of tensors of
bytes. Each has an offset in one of several files. ``descriptors`` has two for each file: one that
is open as usual, and one for direct I/O or -1. They are closed when the request has ended, or at
once if it is refused: the caller never closes them. The queue keeps the tensors alive until the
request has ended.

``aio_wait`` gives the state (0: runs, 1: done, 2: cancelled), an error's number or 0, the part that
failed or -1, and for each part the bytes that were transferred from its begin on. A file may end
before. A request that has ended can be waited for again until ``aio_forget``. ``aio_close`` waits
for all.

Every function writes to ``queue`` as far as torch knows: so a compiled graph keeps their order. The
reference works on threads. It serves ``gds``, too, whose tensors may be on any device.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.library import get_ctx

from opkiln.base import forks
from opkiln.ops.async_io.op import kit
from opkiln.ops.checks import check, check_contiguous, check_on

RUNNING, DONE, CANCELLED = 0, 1, 2


class _ReferenceQueue:
    """Requests on the threads of a pool, a block at a time."""

    def __init__(self, threads: int, block_size: int) -> None:
        self.pool = ThreadPoolExecutor(threads, "async_io")
        self.block_size = block_size
        self.process = os.getpid()
        self.futures: dict[int, Future[list[int]]] = {}
        self.cancelled: dict[int, threading.Event] = {}
        self.numbers = itertools.count(1)
        self.guard = forks.lock()
        self.transferred = 0  # bytes, by all requests

    def add(self, *transfer: Any) -> Tensor:
        """Begin a request, with the other arguments of ``_transfer``; its number."""
        number, cancelled = next(self.numbers), threading.Event()
        future: Future[list[int]] = Future()
        begun = itertools.count()

        def run() -> None:
            if next(begun):
                return
            try:
                found = self._transfer(cancelled, *transfer)
            except BaseException as error:  # for aio_wait to raise
                future.set_exception(error)
            else:
                future.set_result(found)

        self.cancelled[number], self.futures[number] = cancelled, future
        try:
            self.pool.submit(run)
        except RuntimeError:
            # The main thread has ended, or there are too many threads: then this one does it. The
            # pool may have it in its queue all the same, so whoever begins first does it alone.
            run()
        return torch.tensor([number], device="cpu")

    def _transfer(
        self,
        cancelled: threading.Event,
        memory: list[Tensor],
        offsets: list[int],
        files: list[int],
        descriptors: list[int],
        write: bool,
    ) -> list[int]:
        ends = [0] * len(memory)
        part = -1
        try:
            for part, tensor in enumerate(memory):
                plain = descriptors[2 * files[part]]
                blocks = _TensorBlocks(tensor, self.block_size)
                while ends[part] < tensor.numel():
                    if cancelled.is_set():
                        return [CANCELLED, 0, -1, *ends]
                    some = blocks.at(ends[part], write)
                    at = offsets[part] + ends[part]
                    count = os.pwritev(plain, [some], at) if write else os.preadv(plain, [some], at)
                    if count == 0 and write:
                        return [DONE, errno.EIO, part, *ends]
                    if count == 0:
                        break
                    if not write:
                        blocks.put(ends[part], count)
                    ends[part] += count
        except OSError as error:
            return [DONE, error.errno or errno.EIO, part, *ends]
        finally:
            close_descriptors(descriptors)
            with self.guard:
                self.transferred += sum(ends)
        return [DONE, 0, -1, *ends]


class _TensorBlocks:
    """The bytes of a tensor, a block at a time. Those of a device go through memory of the host."""

    def __init__(self, tensor: Tensor, size: int) -> None:
        self._tensor = tensor
        self._size = min(size, tensor.numel())
        self._staged: Tensor | None = None
        if tensor.device.type != "cpu":
            self._staged = torch.empty(self._size, dtype=torch.uint8, device="cpu")
        self._view = _bytes(tensor if self._staged is None else self._staged)

    def at(self, begin: int, write: bool) -> memoryview:
        """The block that begins there, or room for it."""
        if self._staged is None:
            return self._view[begin : begin + self._size]
        there = self._tensor[begin : begin + self._size]
        if write:
            self._staged[: len(there)].copy_(there)
        return self._view[: len(there)]

    def put(self, begin: int, count: int) -> None:
        """Keep what was read."""
        if self._staged is not None:
            self._tensor[begin : begin + count].copy_(self._staged[:count])
            # The copy is on this thread's stream, and the caller may use another.
            torch.accelerator.current_stream(self._tensor.device).synchronize()


_queues: dict[int, _ReferenceQueue] = {}
_numbers = itertools.count(1)


@kit.op(gradient=False)
def aio_probe(like: Tensor, engine: str) -> Tensor:
    """0 if an engine can be used, or an error's number. Here there are threads alone."""
    return torch.tensor([0 if engine == "threads" else errno.ENOSYS], device="cpu")


@kit.op(gradient=False)
def aio_open(like: Tensor, engine: str, depth: int, block_size: int, threads: int) -> Tensor:
    """A new queue. Raises RuntimeError for an engine that cannot be used."""
    if engine != "threads":
        raise RuntimeError(f"{engine} cannot be used: {os.strerror(errno.ENOSYS)}")
    number = next(_numbers)
    _queues[number] = _ReferenceQueue(threads, block_size)
    return torch.tensor([number], device="cpu")


@kit.op(mutates=("queue", "memory"))
def aio_read_(
    queue: Tensor,
    memory: list[Tensor],
    offsets: list[int],
    files: list[int],
    descriptors: list[int],
) -> Tensor:
    """Begin to read. Raises RuntimeError for what cannot be read to."""
    return begin_transfer(queue, memory, offsets, files, descriptors, write=False)


@kit.op(mutates="queue")
def aio_write(
    queue: Tensor,
    memory: list[Tensor],
    offsets: list[int],
    files: list[int],
    descriptors: list[int],
) -> Tensor:
    """Begin to write. Raises RuntimeError for what cannot be written."""
    return begin_transfer(queue, memory, offsets, files, descriptors, write=True)


@kit.op(mutates="queue")
def aio_wait(queue: Tensor, request: int, milliseconds: int) -> Tensor:
    """Wait at most so long, for ever if below 0. Raises RuntimeError for an unknown request."""
    found = queue_of(queue)
    future = found.futures.get(request)
    if future is None:
        raise RuntimeError(f"there is no request {request}: it was forgotten")
    wait([future], None if milliseconds < 0 else milliseconds / 1000)
    if not future.done():
        return torch.tensor([RUNNING, 0, -1], device="cpu")
    return torch.tensor(future.result(), device="cpu")


@kit.op(mutates="queue")
def aio_forget(queue: Tensor, request: int) -> None:
    """Let go of what a request came to. No effect before it has ended."""
    found = queue_of(queue)
    if (future := found.futures.get(request)) is not None and future.done():
        found.futures.pop(request, None)
        found.cancelled.pop(request, None)


@kit.op(mutates="queue")
def aio_cancel(queue: Tensor, request: int) -> None:
    """Transfer nothing more of a request than what is under way."""
    if cancelled := queue_of(queue).cancelled.get(request):
        cancelled.set()


@kit.op(mutates="queue")
def aio_close(queue: Tensor) -> None:
    """Wait for all requests and end the queue. Calling it again has no effect."""
    found = _queues.pop(int(queue), None)
    if found is not None and found.process == os.getpid():
        found.pool.shutdown()


def fake_number(like: Tensor, *_: object) -> Tensor:
    """The number of a queue or a request, or an error's, for tracing."""
    return like.new_empty(1, dtype=torch.int64)


def fake_wait(queue: Tensor, *_: object) -> Tensor:
    """What waiting gives, for tracing."""
    return queue.new_empty(get_ctx().new_dynamic_size(), dtype=torch.int64)


for _each in (aio_probe, aio_open, aio_read_, aio_write):
    _each.fake(fake_number)
aio_wait.fake(fake_wait)


def queue_of(queue: Tensor) -> _ReferenceQueue:
    found = _queues.get(int(queue))
    if found is None:
        raise RuntimeError(f"there is no queue {int(queue)}: it was closed")
    if found.process != os.getpid():
        raise RuntimeError(
            f"queue {int(queue)} was opened in process {found.process}, of which this one is a fork"
        )
    return found


def begin_transfer(
    queue: Tensor,
    memory: list[Tensor],
    offsets: list[int],
    files: list[int],
    descriptors: list[int],
    *,
    write: bool,
    any_device: bool = False,
) -> Tensor:
    try:
        found = queue_of(queue)
        for i, tensor in enumerate(memory):
            check_on(f"memory[{i}]", tensor, tensor.device if any_device else torch.device("cpu"))
            check(f"memory[{i}]", tensor, torch.uint8)
            check_contiguous(f"memory[{i}]", tensor)
            most = (1 << 63) - 1 - tensor.numel()
            if not 0 <= offsets[i] <= most:
                raise RuntimeError(f"offsets[{i}] is {offsets[i]}, expected 0 to {most}")
    except RuntimeError:
        close_descriptors(descriptors)
        raise
    return found.add(list(memory), list(offsets), list(files), list(descriptors), write)


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory. The caller keeps the tensor alive."""
    if tensor.numel() == 0:
        return memoryview(b"")
    whole = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(whole).cast("B")


def close_descriptors(descriptors: list[int]) -> None:
    """Close those of a transfer; -1 is none."""
    for each in descriptors:
        if each >= 0:
            os.close(each)
