"""Fixtures for the catalogue's ops: each test of an op runs on its native version and its reference."""

from __future__ import annotations

from typing import Any

import pytest

from opkiln.errors import OpkilnError


def native(name: str) -> Any:
    """The op's functions, served by its native library; skips where none can be built."""
    from opkiln import get_builder

    try:
        return get_builder(name).jit_load()
    except OpkilnError as error:
        pytest.skip(f"no native {name} here: {error.what}")


@pytest.fixture(params=["native", "reference"])
def adam(request: pytest.FixtureRequest) -> Any:
    """``cpu_adam_`` and ``cpu_adam_rollback_``: the native ones, then the reference's."""
    if request.param == "native":
        return native("cpu_adam")
    from opkiln.ops.cpu_adam import reference

    return reference


@pytest.fixture
def native_adam() -> Any:
    return native("cpu_adam")
