"""The builder and the schemas of ``gds``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder
from opkiln.ops import given_by

# As those of async_io: the queue is the same, and the engine is another.
_TRANSFER = "int[] offsets, int[] files, int[] descriptors"
_QUEUE = "int depth, int block_size, int threads"


class GDSBuilder(OpBuilder):
    """``load()`` gives the functions of a queue for memory of GPUs; see reference.py.

    The library is code of the host. It opens CUDA's driver and cuFile when it is used, so it is
    compiled without either, and one library serves every GPU.
    """

    NAME = "gds"
    BUILD_VAR = "DS_BUILD_GDS"
    SCHEMAS = (
        "gds_probe(Tensor like, bool use_cufile, str libraries) -> (int, str)",
        f"gds_open(Tensor like, bool use_cufile, str libraries, {_QUEUE}, bool host_too) -> Tensor",
        f"gds_read_(Tensor(a!) queue, Tensor(b!)[] memory, {_TRANSFER}) -> Tensor",
        f"gds_write(Tensor(a!) queue, Tensor[] memory, {_TRANSFER}) -> Tensor",
        "gds_wait(Tensor(a!) queue, int request, int milliseconds) -> Tensor",
        "gds_forget(Tensor(a!) queue, int request) -> ()",
        "gds_cancel(Tensor(a!) queue, int request) -> ()",
        "gds_close(Tensor(a!) queue) -> ()",
        "gds_ways(Tensor(a!) queue) -> (int, int, str, str)",
        "gds_register(Tensor memory, str libraries) -> str",
        "gds_unregister(Tensor memory, str libraries) -> str",
    )
    reference = given_by("opkiln.ops.gds.reference")
    fake = given_by("opkiln.ops.gds.fake")

    def sources(self) -> list[str]:
        own = ("gds", "engine", "libraries")
        return ["ops/async_io/queue.cpp", *(f"ops/gds/{each}.cpp" for each in own)]
