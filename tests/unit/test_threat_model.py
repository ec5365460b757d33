"""docs/threat-model.md names a test for each of its claims; each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "threat-model.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_the_page_names_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    tests = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    assert name in tests if name else any(each.startswith("test_") for each in tests)


def test_every_claim_in_a_table_names_one() -> None:
    text = PAGE.read_text()
    tables = re.findall(r"^\|.*Shown by \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    assert len(tables) == text.count("Shown by") > 0
    for table in tables:
        for row in table.splitlines():
            assert re.search(r"`tests/\S+`(, `tests/\S+`)* \|$", row), row
