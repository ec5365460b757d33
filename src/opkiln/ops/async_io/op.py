"""Reads and writes of tensors that go on while the program does something else."""

from __future__ import annotations

from opkiln.builder import OpBuilder
from opkiln.builder.library import library


class AsyncIOBuilder(OpBuilder):
    NAME = "async_io"
    BUILD_VAR = "DS_BUILD_AIO"

    def sources(self) -> list[str]:
        return ["ops/async_io/cpu.cpp", "ops/async_io/engines.cpp", "ops/async_io/queue.cpp"]


kit = library(AsyncIOBuilder, functions="opkiln.ops.async_io.functions")
