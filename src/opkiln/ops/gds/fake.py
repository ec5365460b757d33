"""What ``gds``'s functions return, without the contents: for tracing."""

from __future__ import annotations

from opkiln.ops.async_io import fake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from torch import Tensor


def gds_open(
    like: Tensor,
    use_cufile: bool,  # noqa: ARG001
    libraries: str,
    depth: int,
    block_size: int,
    threads: int,
    host_too: bool,  # noqa: ARG001
) -> Tensor:
    return fake.aio_open(like, libraries, depth, block_size, threads)


gds_read_, gds_write, gds_wait = fake.aio_read_, fake.aio_write, fake.aio_wait
gds_forget, gds_cancel, gds_close = fake.aio_forget, fake.aio_cancel, fake.aio_close
