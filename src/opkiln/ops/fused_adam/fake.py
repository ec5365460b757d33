"""Fake kernels of ``fused_adam``'s functions that return tensors."""

from __future__ import annotations

from torch import Tensor

from opkiln.ops.multi_tensor.plans import fake_plan


def fused_adam_plan(params: list[Tensor], *others: list[Tensor]) -> tuple[Tensor, Tensor]:
    return fake_plan(params, steps=others[-1])
