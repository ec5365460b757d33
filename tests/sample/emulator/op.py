"""The declaration of ``kernels``."""

from __future__ import annotations

from opkiln.base.model import ABI_NONE, CUDA, PLAIN
from opkiln.builder import CUDAOpBuilder


class KernelsBuilder(CUDAOpBuilder):
    """``load()`` gives a ctypes library with the function ``emulate``."""

    NAME = "kernels"
    KIND = PLAIN
    ABI = ABI_NONE
    BACKENDS = (CUDA,)
    EMULATE = True

    def sources(self) -> list[str]:
        return ["emulator/kernels.cu"]
