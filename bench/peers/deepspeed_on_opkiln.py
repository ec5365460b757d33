"""DeepSpeed's builder of cpu_adam on opkiln: opkiln's op, behind DeepSpeed's functions."""

from __future__ import annotations

from typing import Any


def bring() -> None:
    """Import what a program that uses the builder imports, and the line that it adds."""
    from deepspeed.ops.op_builder import CPUAdamBuilder  # noqa: F401

    import opkiln.compat.deepspeed.auto  # noqa: F401


def load() -> Any:
    """The module that stands in for the extension's, its op built first where it is not."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    return CPUAdamBuilder().load()


def check(module: Any) -> None:
    """It is opkiln's, has the op's functions, and makes a step."""
    import torch

    assert type(module).__module__.startswith("opkiln."), type(module)
    module.create_adam(0, 0.1, 0.9, 0.999, 1e-8, 0.0, True, False)
    param, grad, *states = (torch.ones(8), torch.ones(8), torch.zeros(8), torch.zeros(8))
    module.adam_update(0, 1, 0.1, 0.9, 0.999, 1e-8, 0.0, True, param, grad, *states)
    assert abs(param[0].item() - 0.9) < 1e-5
