"""What ``async_io``'s functions return, without the contents: for tracing."""

from __future__ import annotations

from torch import SymInt, Tensor


def aio_probe(like: Tensor, *_: object) -> Tensor:
    return _numbers(like, 1)


aio_open = aio_read_ = aio_write = aio_probe  # a number each: of a queue, and of requests


def aio_wait(queue: Tensor, *_: object) -> Tensor:
    from torch.library import get_ctx

    return _numbers(queue, get_ctx().new_dynamic_size())


def aio_forget(*_: object) -> None:
    """Nothing is returned."""


aio_cancel = aio_close = aio_forget


def _numbers(like: Tensor, count: int | SymInt) -> Tensor:
    from torch import int64

    return like.new_empty(count, dtype=int64)
