"""``gds``: reads and writes between files and the memory of GPUs."""

from __future__ import annotations

from opkiln.builder import OpBuilder
from opkiln.builder.library import library


class GDSBuilder(OpBuilder):
    """The library is code of the host. It opens CUDA's driver and cuFile when it is used, so it is
    compiled without either, and one library serves every GPU."""

    NAME = "gds"
    BUILD_VAR = "DS_BUILD_GDS"

    def sources(self) -> list[str]:
        own = ("gds", "engine", "libraries")
        return ["ops/async_io/queue.cpp", *(f"ops/gds/{each}.cpp" for each in own)]


kit = library(GDSBuilder, functions="opkiln.ops.gds.functions")
