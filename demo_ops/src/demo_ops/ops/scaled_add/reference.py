"""What the op computes, in PyTorch: the fallback, and what its tests compare with."""


def scaled_add(x, y, scale):
    return x + scale * y
