"""A plugin of pytest for mutmut 3.8, which asks for a test's name by an attribute that pytest 9.2
no longer has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item._nodeid = item.nodeid  # type: ignore[attr-defined]
