"""All tests on a GPU share a store: the catalogue takes minutes to compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def shared(cache: Path, catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(catalogue))
