"""DeepSpeed: its cpu_adam through its own builder."""

from __future__ import annotations

from typing import Any


def bring() -> None:
    """Import what a program that uses the builder imports."""
    from deepspeed.ops.op_builder import CPUAdamBuilder  # noqa: F401


def load() -> Any:
    """The extension module, built first where it is not."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    return CPUAdamBuilder().load()


def check(module: Any) -> None:
    """It is the op."""
    assert callable(module.adam_update)
