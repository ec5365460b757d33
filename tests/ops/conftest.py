"""Fixtures for the catalogue: a test of an op runs on its native version and on its reference."""

from __future__ import annotations

from typing import Any

import pytest

from opkiln.errors import ToolchainError


def _native(name: str) -> Any:
    """The op's functions, served by its native library; skips where there is no compiler."""
    from opkiln import get_builder

    try:
        return get_builder(name).jit_load()
    except ToolchainError as error:
        pytest.skip(f"no native {name} here: {error.what}")


@pytest.fixture(params=["native", "reference"])
def adam(request: pytest.FixtureRequest) -> Any:
    """``cpu_adam_`` and ``cpu_adam_rollback_``: the native ones, then the reference's."""
    if request.param == "native":
        return _native("cpu_adam")
    from opkiln.ops.cpu_adam import reference

    return reference


@pytest.fixture
def native_adam() -> Any:
    """The native ``cpu_adam_`` and ``cpu_adam_rollback_``."""
    return _native("cpu_adam")


@pytest.fixture(params=["native", "reference"])
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What CPUAdam runs on: the native op, then the reference."""
    from opkiln.optim import CPUAdam

    if request.param == "native":
        ops = _native("cpu_adam")
    else:
        from opkiln.ops.cpu_adam import reference as ops
    monkeypatch.setattr(CPUAdam, "_ops", ops)
    return str(request.param)
