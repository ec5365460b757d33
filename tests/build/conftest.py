"""What several files of tests share because it takes seconds to make."""

from __future__ import annotations

import pytest
from sample.workshop import Workshop

from opkiln.machine.toolchain import nvcc


@pytest.fixture(autouse=True)
def compilers_are_known(warm: None) -> None:
    """No test here has to ask the compilers what they are."""


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A package of CUDA ops, and toolkits to build it with."""
    if not nvcc.available():
        pytest.skip("no nvcc on this machine")
    return Workshop(tmp_path_factory.mktemp("shop"))
