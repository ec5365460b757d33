"""A package with one native op."""

from torch import Tensor

import opkiln


@opkiln.op("scaled_add.cpp")
def scaled_add(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """x + scale * y"""
    return x + scale * y
