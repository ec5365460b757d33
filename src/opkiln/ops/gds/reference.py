"""``gds`` in Python: what serves without a native version, and on devices other than CUDA's.

The functions are those of ``async_io``, and so is the queue: see its reference. Tensors may be on
any device. Here they are copied by torch, a block at a time. The native version asks CUDA's driver
and cuFile. ``gds_probe`` says what they answer: 0 for GPUDirect Storage, 1 for a cuFile that copies
through the host, 2 for no cuFile (it is asked only if ``use_cufile``), 3 for no driver, and the
reason. ``gds_ways`` gives the bytes that cuFile transferred, those that were copied, why cuFile
refused something, and why a copy failed. ``libraries`` are paths of libcufile, separated by colons,
to try after the one that is loaded. ``host_too`` has tensors on the CPU count as memory of a GPU,
for tests.
"""

from __future__ import annotations

from torch.autograd.graph import increment_version

from opkiln.ops.async_io import reference as queues

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor

_WHY = "this is the pure-Python version of gds"


def gds_probe(like: Tensor, use_cufile: bool, libraries: str) -> tuple[int, str]:  # noqa: ARG001
    """There is no driver here that could be asked."""
    return 3, _WHY


def gds_open(
    like: Tensor,
    use_cufile: bool,
    libraries: str,  # noqa: ARG001
    depth: int,
    block_size: int,
    threads: int,
    host_too: bool,  # noqa: ARG001
) -> Tensor:
    """A new queue. Raises RuntimeError if cuFile is asked for."""
    if use_cufile:
        raise RuntimeError(f"cuFile cannot be used: {_WHY}")
    return queues.aio_open(like, "threads", depth, block_size, threads)


def gds_read_(queue: Tensor, memory: list[Tensor], *places: list[int]) -> Tensor:
    """Begin to read. Raises RuntimeError for what cannot be read to."""
    # The dispatcher counts versions, and on other devices than CUDA's this is called without it.
    increment_version([each for each in memory if not each.is_inference()])
    return queues.begin_transfer(queue, memory, *places, write=False, any_device=True)


def gds_write(queue: Tensor, memory: list[Tensor], *places: list[int]) -> Tensor:
    """Begin to write. Raises RuntimeError for what cannot be written."""
    return queues.begin_transfer(queue, memory, *places, write=True, any_device=True)


gds_wait, gds_forget = queues.aio_wait, queues.aio_forget
gds_cancel, gds_close = queues.aio_cancel, queues.aio_close


def gds_ways(queue: Tensor) -> tuple[int, int, str, str]:
    """All bytes were copied."""
    return 0, queues.queue_of(queue).transferred, _WHY, ""


def gds_register(memory: Tensor, libraries: str) -> str:  # noqa: ARG001
    """Why there is no cuFile that could know this memory."""
    return _WHY


def gds_unregister(memory: Tensor, libraries: str) -> str:  # noqa: ARG001
    """Nothing was registered."""
    return ""
