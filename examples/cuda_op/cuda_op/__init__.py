"""A package with one op for CUDA, ROCm and the CPU."""

from pathlib import Path

import opkiln
from opkiln import CUDAOpBuilder


class BiasGeluBuilder(CUDAOpBuilder):
    NAME = "bias_gelu"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = ("bias_gelu(Tensor x, Tensor bias) -> Tensor",)

    def sources(self):
        if self.build_for_cpu:
            return ["cpu.cpp"]
        return ["bias_gelu.cu", "cuda_binding.cpp"]

    def include_paths(self):
        return [Path(opkiln.__file__).parent / "csrc"]  # opkiln/cuda_stream.h

    def reference(self):
        from cuda_op import reference

        return reference

    def fake(self):
        from cuda_op import fake

        return fake

    def autograd(self):
        from cuda_op import gradients

        return gradients


def bias_gelu(x, bias):
    """gelu(x + bias)"""
    return BiasGeluBuilder.functions(x.device.type).bias_gelu(x, bias)
