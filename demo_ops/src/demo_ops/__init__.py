"""demo_ops: PyTorch ops with native code for the CPU and for GPUs.

Importing it compiles nothing and does not import torch. The first call of an op loads its native
code: precompiled where it was installed so, else compiled here, once; else its reference serves.
"""

__version__ = "0.1.0"

_ops = {}


def scaled_add(x, y, scale):
    """x + scale * y, for contiguous float32 tensors of one shape. It has gradients."""
    # No functools.cache: torch.compile ignores it, and would trace the load.
    device = x.device.type
    if device not in _ops:
        from demo_ops.ops.scaled_add.op import ScaledAddBuilder

        # A machine with a GPU has tensors on the CPU, too; each device's library is one of its own.
        _ops[device] = ScaledAddBuilder(backend="cpu" if device == "cpu" else None).load()
    return _ops[device].scaled_add(x, y, scale)
