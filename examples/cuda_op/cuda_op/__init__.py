"""A package with one op for CUDA, ROCm and the CPU."""

import torch
from torch import Tensor

import opkiln


@opkiln.op("bias_gelu.cpp", cuda="bias_gelu.cu")
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu(x + bias)"""
    return torch.nn.functional.gelu(x + bias)
