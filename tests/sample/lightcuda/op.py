"""The library of ``lightcuda``."""

from __future__ import annotations

import opkiln
from opkiln.base.model import CUDA


class LightcudaBuilder(opkiln.CUDAOpBuilder):
    """Kernel, launch and binding are in one ``.cu``."""

    NAME = "lightcuda"
    BACKENDS = (CUDA,)

    def sources(self) -> list[str]:
        return ["csrc/bias_gelu.cu"]


kit = opkiln.library(LightcudaBuilder, functions=f"{__name__.partition('.')[0]}.functions")
