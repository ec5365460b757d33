"""A package with one native op."""

import opkiln
from torch import Tensor


@opkiln.op("scaled_add.cpp")
def scaled_add(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """x + scale * y"""
    return x + scale * y
