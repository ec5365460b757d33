"""The builder and the schemas of ``packbits``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


class PackbitsBuilder(CUDAOpBuilder):
    """``load()`` gives ``packbits`` and ``unpackbits``; see reference.py."""

    NAME = "packbits"
    BUILD_VAR = "DS_BUILD_PACK_BITS"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (
        "packbits(Tensor x) -> Tensor",
        "unpackbits(Tensor packed, int numel, ScalarType dtype) -> Tensor",
    )

    def sources(self) -> list[str]:
        if self.build_for_cpu:
            return ["ops/packbits/cpu.cpp", "ops/packbits/cpu_binding.cpp"]
        return ["ops/packbits/cuda.cu", "ops/packbits/cuda_binding.cpp"]

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def reference(self) -> ModuleType:
        from opkiln.ops.packbits import reference

        return reference

    def fake(self) -> ModuleType:
        from opkiln.ops.packbits import fake

        return fake
