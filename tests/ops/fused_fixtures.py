"""The three versions of a fused optimizer's op: the CUDA kernels on the CPU, native, reference."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from fused_kernel import Kernel

import opkiln
from opkiln.errors import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Callable


def native(op: str) -> Any:
    """The op's native version for the CPU; skips where there is no compiler."""
    try:
        return opkiln.get_builder(op).jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native {op} here: {error.what}")


def fixtures(op: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The fixtures ``kernel`` and ``op`` of a module; the second is all three, one by one."""

    @pytest.fixture(scope="module", name="kernel")
    def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
        return Kernel(op, tmp_path_factory.mktemp("kernel"))

    @pytest.fixture(params=["kernel", "native", "reference"], name="op")
    def each(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Any:
        if request.param == "reference":
            yield import_module(f"opkiln.ops.{op}.reference")
        elif request.param == "native":
            yield native(op)
        else:
            yield request.getfixturevalue("kernel")
            assert "runtime error" not in capfd.readouterr().err  # what the sanitizers saw

    return kernel, each
