"""The builder and the schemas of ``pin_memory``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# `memory` is in host memory whatever the backend; `device`, a tensor of any contents, is on the
# device that is to copy from and to it, and chooses the version.
_ARGUMENTS = "(Tensor(a!) memory, Tensor device) -> ()"


class PinMemoryBuilder(CUDAOpBuilder):
    """``load()`` gives ``lock_pages_`` and ``unlock_pages_``; see reference.py."""

    NAME = "pin_memory"
    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (f"lock_pages_{_ARGUMENTS}", f"unlock_pages_{_ARGUMENTS}")

    def sources(self) -> list[str]:
        if self.build_for_cpu:
            return ["ops/pin_memory/cpu_binding.cpp"]
        return ["ops/pin_memory/register_pages.cu", "ops/pin_memory/cuda_binding.cpp"]

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def reference(self) -> ModuleType:
        from opkiln.ops.pin_memory import reference

        return reference
