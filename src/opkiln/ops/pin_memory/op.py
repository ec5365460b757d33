"""The builder and the schemas of ``pin_memory``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder
from opkiln.ops import given_by

# `memory` is in host memory whatever the backend; `device`, a tensor of any contents, is on the
# device that is to copy from and to it, and chooses the version.
_ARGUMENTS = "(Tensor(a!) memory, Tensor device) -> ()"


class PinMemoryBuilder(CUDAOpBuilder):
    """``load()`` gives ``lock_pages_`` and ``unlock_pages_``; see reference.py."""

    NAME = "pin_memory"
    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (f"lock_pages_{_ARGUMENTS}", f"unlock_pages_{_ARGUMENTS}")
    reference = given_by("opkiln.ops.pin_memory.reference")

    @classmethod
    def emulates(cls) -> bool:
        """There is no kernel that the emulator could run."""
        return False

    def sources(self) -> list[str]:
        return ["ops/pin_memory/cpu.cpp" if self.build_for_cpu else "ops/pin_memory/cuda.cu"]
