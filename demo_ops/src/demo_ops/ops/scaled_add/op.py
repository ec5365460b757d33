"""The builder and the schema of ``scaled_add``. Imports no torch: a build may have none."""

from pathlib import Path

import opkiln
from opkiln import CUDAOpBuilder


class ScaledAddBuilder(CUDAOpBuilder):
    NAME = "scaled_add"
    BACKENDS = ("cuda", "rocm", "cpu")  # ROCm's from the CUDA sources
    SCHEMAS = ("scaled_add(Tensor x, Tensor y, float scale) -> Tensor",)

    def sources(self):
        here = "ops/scaled_add"
        if self.build_for_cpu:
            return [f"{here}/cpu.cpp"]
        return [f"{here}/cuda.cu", f"{here}/cuda_binding.cpp"]

    def include_paths(self):
        return [Path(opkiln.__file__).parent / "csrc"]  # opkiln/cuda_stream.h

    def reference(self):
        from demo_ops.ops.scaled_add import reference

        return reference

    def fake(self):
        from demo_ops.ops.scaled_add import fake

        return fake

    def autograd(self):
        from demo_ops.ops.scaled_add import gradients

        return gradients
