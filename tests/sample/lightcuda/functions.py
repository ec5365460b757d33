"""The functions of ``lightcuda``."""

from __future__ import annotations

import torch
from torch import Tensor

from .op import kit


@kit.op()
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x + bias)


@kit.op(mutates="x")
def clustered(x: Tensor) -> None:
    raise NotImplementedError
