"""What the library computes, in PyTorch: the fallback, and what its tests compare with."""

import torch
from torch import Tensor

from sycl_op.op import kit


@kit.op()
def silu_mul(x: Tensor, y: Tensor) -> Tensor:
    """x * sigmoid(x) * y"""
    return torch.nn.functional.silu(x) * y
