"""Programs that are not ours, in front of the store."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from sample import known
from sample.ninja_project import Project

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that knows the compilers and has what is preloaded into ninja."""
    store = known.make_store(tmp_path_factory.mktemp("ready") / "store")
    idle = Project(tmp_path_factory.mktemp("idle"), "build out: touch\n")
    idle.build("--version", OPKILN_CACHE_DIR=str(store))
    return store


@pytest.fixture(autouse=True)
def compilers_are_known(cache: Path, ready: Path) -> None:
    """No test here has to ask the compilers what they are, or compile what is ours."""
    shutil.copytree(ready, cache)
