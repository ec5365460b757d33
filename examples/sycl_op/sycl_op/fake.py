"""The shape of the result, for torch.compile."""

import torch


def silu_mul(x, y):
    return torch.empty_like(x)
