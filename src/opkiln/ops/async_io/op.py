"""The builder and the schemas of ``async_io``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder
from opkiln.ops import given_by

# `memory` are tensors of bytes, `offsets` where each begins in its file, `files` which file that
# is. `descriptors` are two for each file: one that is open as usual, and one for direct I/O or -1.
_TRANSFER = "int[] offsets, int[] files, int[] descriptors"


class AsyncIOBuilder(OpBuilder):
    """``load()`` gives the functions of a queue; see reference.py."""

    NAME = "async_io"
    BUILD_VAR = "DS_BUILD_AIO"
    # Every function writes to `queue` as far as torch knows: so a compiled graph keeps their order.
    SCHEMAS = (
        "aio_probe(Tensor like, str engine) -> Tensor",
        "aio_open(Tensor like, str engine, int depth, int block_size, int threads) -> Tensor",
        f"aio_read_(Tensor(a!) queue, Tensor(b!)[] memory, {_TRANSFER}) -> Tensor",
        f"aio_write(Tensor(a!) queue, Tensor[] memory, {_TRANSFER}) -> Tensor",
        "aio_wait(Tensor(a!) queue, int request, int milliseconds) -> Tensor",
        "aio_forget(Tensor(a!) queue, int request) -> ()",
        "aio_cancel(Tensor(a!) queue, int request) -> ()",
        "aio_close(Tensor(a!) queue) -> ()",
    )
    reference = given_by("opkiln.ops.async_io.reference")
    fake = given_by("opkiln.ops.async_io.fake")

    def sources(self) -> list[str]:
        return ["ops/async_io/cpu.cpp", "ops/async_io/engines.cpp", "ops/async_io/queue.cpp"]
