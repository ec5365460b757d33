"""The builder and the schemas of ``utils``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder
from opkiln.ops import given_by


class UtilsBuilder(CUDAOpBuilder):
    """``load()`` gives ``flatten_list`` and ``unflatten_list_``; see reference.py."""

    NAME = "utils"
    BUILD_VAR = "DS_BUILD_UTILS"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (
        "flatten_list(Tensor[] tensors) -> Tensor",
        "unflatten_list_(Tensor(a!)[] tensors, Tensor flat) -> ()",
    )
    reference = given_by("opkiln.ops.utils.reference")

    def sources(self) -> list[str]:
        return ["ops/utils/cpu.cpp" if self.build_for_cpu else "ops/utils/cuda.cu"]
