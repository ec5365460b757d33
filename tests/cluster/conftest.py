"""What the tests of jobs share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def compilers_are_known(warm: None) -> None:
    """No test here has to ask the compilers what they are."""
