"""The shape of the result, for torch.compile."""

import torch


def scaled_add(x, y, scale):
    return torch.empty_like(x)
