"""The catalogue's CUDA kernels on the CPU, run by the emulator."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import opkiln
from opkiln.errors import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Iterator


def emulated(builder: type[opkiln.OpBuilder]) -> Any:
    """The functions of an op whose CUDA kernels the emulator runs on CPU tensors. They are an op of
    their own, because the version for the CPU may be loaded, too."""
    words = {"DISTRIBUTION": "emulated", "__module__": builder.__module__}
    made = type(f"Emulated{builder.__name__}", (builder,), words)
    try:
        return made(backend="emulated").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"kernels cannot be emulated here: {error.what}")


def emulated_functions(*functions: Any) -> Any:
    """The functions of an ``opkiln.library``, or of several, as ops of their own whose CUDA kernels
    the emulator runs on CPU tensors. Each library is built once, for all dtypes."""
    by_library: dict[Any, list[Any]] = {}
    for each in functions:
        by_library.setdefault(each.builder, []).append(each)
    made: dict[str, Any] = {}
    for builder, its in by_library.items():
        made |= _twins(builder, its)
    return SimpleNamespace(**made)


def _twins(builder: Any, functions: list[Any]) -> dict[str, Any]:
    twin = opkiln.library(
        f"emulated_{builder.NAME}",
        cuda=builder.SOURCES.cuda,
        namespace="emulated",
        emulate=True,
    )
    # Where the sources are: the emulator translates a copy of those below the root.
    twin.builder.PLACE, twin.builder.DIRECTORY = builder.PLACE, builder.DIRECTORY
    made = {}
    for each in functions:
        arguments = each.overload._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        made[each.__name__] = twin.op(mutates=written)(each.reference)
    try:
        twin.builder(backend="emulated").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"kernels cannot be emulated here: {error.what}")
    return made


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, or of the greatest numbers: what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
