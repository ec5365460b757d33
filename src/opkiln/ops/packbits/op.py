"""The builder and the schemas of ``packbits``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder
from opkiln.ops import given_by


class PackbitsBuilder(CUDAOpBuilder):
    """``load()`` gives ``packbits`` and ``unpackbits``; see reference.py."""

    NAME = "packbits"
    BUILD_VAR = "DS_BUILD_PACK_BITS"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (
        "packbits(Tensor x) -> Tensor",
        "unpackbits(Tensor packed, int numel, ScalarType dtype) -> Tensor",
    )
    reference = given_by("opkiln.ops.packbits.reference")

    def sources(self) -> list[str]:
        return ["ops/packbits/cpu.cpp" if self.build_for_cpu else "ops/packbits/cuda.cu"]
