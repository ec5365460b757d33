"""What ``gds``'s functions return, without the contents: for tracing."""

from __future__ import annotations

from opkiln.ops.async_io import fake

gds_open, gds_read_, gds_write, gds_wait = (
    fake.aio_open, fake.aio_read_, fake.aio_write, fake.aio_wait
)  # fmt: skip
gds_forget, gds_cancel, gds_close = fake.aio_forget, fake.aio_cancel, fake.aio_close
