"""The catalogue's CUDA kernels on the CPU, run by the emulator."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import opkiln
from opkiln.errors import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Iterator


def twin(builder: type[opkiln.OpBuilder]) -> opkiln.OpBuilder:
    """An op whose CUDA kernels the emulator runs on CPU tensors. It is an op of its own, because
    the version for the CPU may be loaded, too. The library of a variant serves the op itself."""
    if getattr(builder, "VALUES", ()):
        return _emulated_class(builder)(backend="emulated")
    module = import_module(builder.FUNCTIONS.module)
    its = [
        each
        for each in vars(module).values()
        if hasattr(each, "overload") and each.builder is builder
    ]
    return next(twin_libraries(*its))[0]


def twin_libraries(*functions: Any) -> Iterator[tuple[opkiln.OpBuilder, dict[str, Any]]]:
    """The same for functions of libraries: for each library, its builder and functions. Each is
    built once, for all dtypes."""
    by_library: dict[Any, list[Any]] = {}
    for each in functions:
        by_library.setdefault(each.builder, []).append(each)
    for builder, its in by_library.items():
        library = _twin_library(builder)
        made = {}
        for each in its:
            written = [
                argument.name
                for argument in each.overload._schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            made[each.__name__] = library.op(mutates=written)(each.reference)
        yield library.builder(backend="emulated"), made


def _emulated_class(builder: Any) -> Any:
    words = {"DISTRIBUTION": "emulated", "__module__": builder.__module__}
    return type(f"Emulated{builder.__name__}", (builder,), words)


def _twin_library(builder: Any) -> Any:
    if not hasattr(builder, "SOURCES"):  # a class with methods
        return opkiln.library(_emulated_class(builder))
    library = opkiln.library(
        f"emulated_{builder.NAME}",
        cuda=builder.SOURCES.cuda,
        namespace="emulated",
        emulate=True,
    )
    # Where the sources are: the emulator translates a copy of those below the root.
    for name in ("__module__", "FILE", "DIRECTORY"):
        setattr(library.builder, name, getattr(builder, name))
    library.builder.DISTRIBUTION = "emulated"
    return library


def emulated(builder: type[opkiln.OpBuilder]) -> Any:
    """The functions of an op's twin."""
    return _loaded(twin(builder))


def emulated_functions(*functions: Any) -> Any:
    """The functions, by name, of the twins of their libraries."""
    made: dict[str, Any] = {}
    for builder, its in twin_libraries(*functions):
        _loaded(builder)
        made |= its
    return SimpleNamespace(**made)


def _loaded(builder: opkiln.OpBuilder) -> Any:
    try:
        return builder.jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"kernels cannot be emulated here: {error.what}")


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, or of the greatest numbers: what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
