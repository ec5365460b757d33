"""The declaration of ``lightcuda``."""

from __future__ import annotations

from opkiln.base.model import CUDA
from opkiln.builder import CUDAOpBuilder


class LightcudaBuilder(CUDAOpBuilder):
    """Kernel, launch and binding are in one ``.cu``."""

    NAME = "lightcuda"
    BACKENDS = (CUDA,)
    SCHEMAS = (
        "bias_gelu(Tensor x, Tensor bias) -> Tensor",
        "clustered(Tensor(a!) x) -> ()",
    )

    def sources(self) -> list[str]:
        return ["csrc/bias_gelu.cu"]
