"""The shape of the result, for torch.compile."""

import torch


def bias_gelu(x, bias):
    return torch.empty_like(x)
