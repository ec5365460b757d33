"""What the op computes, in PyTorch: the fallback, and what its tests compare with."""

import torch


def silu_mul(x, y):
    return torch.nn.functional.silu(x) * y
