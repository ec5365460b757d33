"""What ``async_io``'s functions return, without the contents: for tracing."""

from __future__ import annotations

from torch import SymInt, Tensor


def aio_probe(like: Tensor, engine: str) -> Tensor:  # noqa: ARG001
    return _numbers(like, 1)


def aio_open(like: Tensor, engine: str, depth: int, block_size: int, threads: int) -> Tensor:  # noqa: ARG001
    return _numbers(like, 1)


def aio_read_(
    queue: Tensor,
    memory: list[Tensor],  # noqa: ARG001
    offsets: list[int],  # noqa: ARG001
    files: list[int],  # noqa: ARG001
    descriptors: list[int],  # noqa: ARG001
) -> Tensor:
    return _numbers(queue, 1)


aio_write = aio_read_


def aio_wait(queue: Tensor, request: int, milliseconds: int) -> Tensor:  # noqa: ARG001
    from torch.library import get_ctx

    return _numbers(queue, get_ctx().new_dynamic_size())


def aio_forget(queue: Tensor, request: int) -> None:
    """Nothing is returned."""


def aio_cancel(queue: Tensor, request: int) -> None:
    """Nothing is returned."""


def aio_close(queue: Tensor) -> None:
    """Nothing is returned."""


def _numbers(like: Tensor, count: int | SymInt) -> Tensor:
    from torch import int64

    return like.new_empty(count, dtype=int64)
