"""The three versions of a fused optimizer's op: the CUDA kernels on the CPU, native, reference."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample.references import references
from stand_in import emulated

import opkiln
from opkiln.errors import ToolchainError
from opkiln.loading.here import here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def native(op: str) -> Any:
    """The op's native version for the CPU; skips where there is no compiler."""
    try:
        return opkiln.get_builder(op).jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native {op} here: {error.what}")


def emulated_op(op: str) -> Any:
    """The op's CUDA kernels, which the emulator runs."""
    return emulated(type(opkiln.get_builder(op)))


def launches(op: str) -> int:
    """How many kernels of the op the emulator has run so far."""
    library = here.listed["emulated", op, "cpu"][0].library
    return ctypes.c_uint64.in_dll(library, "opkiln_emulator_launches").value


def fixtures(op: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The fixtures ``kernel`` and ``op`` of a module; the second is all three, one by one."""

    @pytest.fixture(name="kernel")
    def kernel() -> Iterator[Any]:
        made = emulated_op(op)
        # New memory is NaN then, so that a sum that is read before it is written is seen.
        torch.use_deterministic_algorithms(True)
        yield made
        torch.use_deterministic_algorithms(False)

    @pytest.fixture(params=["kernel", "native", "reference"], name="op")
    def each(request: pytest.FixtureRequest) -> Any:
        if request.param == "reference":
            return references(op)
        return native(op) if request.param == "native" else request.getfixturevalue("kernel")

    return kernel, each
