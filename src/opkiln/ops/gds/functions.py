"""The functions of the library; their bodies are the reference.

They are those of ``async_io``, and so is the queue: see there. Tensors may be on any device. In the
reference they are copied by torch, a block at a time. The native version asks CUDA's driver
and cuFile. ``gds_probe`` says what they answer: 0 for GPUDirect Storage, 1 for a cuFile that copies
through the host, 2 for no cuFile (it is asked only if ``use_cufile``), 3 for no driver, and the
reason. ``gds_ways`` gives the bytes that cuFile transferred, those that were copied, why cuFile
refused something, and why a copy failed. ``libraries`` are paths of libcufile, separated by colons,
to try after the one that is loaded. ``host_too`` has tensors on the CPU count as memory of a GPU,
for tests.
"""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor
from torch.autograd.graph import increment_version

from opkiln.ops.async_io import functions as queues
from opkiln.ops.gds.op import kit

_WHY = "this is the pure-Python version of gds"


@kit.op(gradient=False)
def gds_probe(like: Tensor, use_cufile: bool, libraries: str) -> tuple[int, str]:
    """There is no driver here that could be asked."""
    return 3, _WHY


@kit.op(gradient=False)
def gds_open(
    like: Tensor,
    use_cufile: bool,
    libraries: str,
    depth: int,
    block_size: int,
    threads: int,
    host_too: bool,
) -> Tensor:
    """A new queue. Raises RuntimeError if cuFile is asked for."""
    if use_cufile:
        raise RuntimeError(f"cuFile cannot be used: {_WHY}")
    queue: Tensor = queues.aio_open.reference(like, "threads", depth, block_size, threads)
    return queue


@kit.op(mutates=("queue", "memory"))
def gds_read_(
    queue: Tensor,
    memory: list[Tensor],
    offsets: list[int],
    files: list[int],
    descriptors: list[int],
) -> Tensor:
    """Begin to read. Raises RuntimeError for what cannot be read to."""
    # The dispatcher counts versions, and on other devices than CUDA's this is called without it.
    increment_version([each for each in memory if not each.is_inference()])
    return queues.begin_transfer(
        queue, memory, offsets, files, descriptors, write=False, any_device=True
    )


@kit.op(mutates="queue")
def gds_write(
    queue: Tensor,
    memory: list[Tensor],
    offsets: list[int],
    files: list[int],
    descriptors: list[int],
) -> Tensor:
    """Begin to write. Raises RuntimeError for what cannot be written."""
    return queues.begin_transfer(
        queue, memory, offsets, files, descriptors, write=True, any_device=True
    )


@kit.op(mutates="queue")
def gds_wait(queue: Tensor, request: int, milliseconds: int) -> Tensor:
    """As ``aio_wait``."""
    outcome: Tensor = queues.aio_wait.reference(queue, request, milliseconds)
    return outcome


@kit.op(mutates="queue")
def gds_forget(queue: Tensor, request: int) -> None:
    """As ``aio_forget``."""
    queues.aio_forget.reference(queue, request)


@kit.op(mutates="queue")
def gds_cancel(queue: Tensor, request: int) -> None:
    """As ``aio_cancel``."""
    queues.aio_cancel.reference(queue, request)


@kit.op(mutates="queue")
def gds_close(queue: Tensor) -> None:
    """As ``aio_close``."""
    queues.aio_close.reference(queue)


@kit.op(mutates="queue")
def gds_ways(queue: Tensor) -> tuple[int, int, str, str]:
    """All bytes were copied."""
    return 0, queues.queue_of(queue).transferred, _WHY, ""


@kit.op(gradient=False)
def gds_register(memory: Tensor, libraries: str) -> str:
    """Why there is no cuFile that could know this memory."""
    return _WHY


@kit.op(gradient=False)
def gds_unregister(memory: Tensor, libraries: str) -> str:
    """Nothing was registered."""
    return ""


for _each in (gds_open, gds_read_, gds_write):
    _each.fake(queues.fake_number)
gds_wait.fake(queues.fake_wait)

# The functions of a queue, for memory that the native version cannot reach.
REFERENCES = SimpleNamespace(
    **{
        each.__name__: each.reference
        for each in (
            gds_open, gds_read_, gds_write, gds_wait, gds_forget, gds_cancel, gds_close, gds_ways,
        )
    }
)  # fmt: skip
