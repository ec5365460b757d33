"""The tutorial for users of DeepSpeed, where DeepSpeed is installed: ``make test-deepspeed``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from test_tutorials import TUTORIALS, follow


@pytest.fixture
def warm() -> None:
    """The tutorial has a store of its own."""


@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="DeepSpeed is not installed")
def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    follow(TUTORIALS / "move-from-deepspeed.md", tmp_path, Path(sys.executable).parent)
