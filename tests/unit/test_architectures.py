"""Tests name no CPU architecture themselves: ``sample/levels.py`` does, for both."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sample import levels

TESTS = Path(__file__).resolve().parents[1]
NAMES = re.compile("|".join(levels.WORDS))


def literals(source: str) -> list[tuple[int, str]]:
    """The string literals of a module that name an architecture, without docstrings."""
    if not NAMES.search(source):
        return []
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docstrings
        if isinstance(node.value, str) and NAMES.search(node.value)
    ]


def test_literal_that_names_an_architecture_is_found() -> None:
    arm, x86 = levels.AARCH64, levels.X86_V3
    source = f'"""For {arm}."""\nA = "{x86}"\n\ndef f():\n    """{arm}"""\n    g(f"{{A}}-{arm}")\n'
    assert literals(source) == [(2, x86), (6, f"-{arm}")]


def test_no_test_names_an_architecture() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {text!r}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(levels.__file__)
        for line, text in literals(path.read_text())
    ]
    assert not found, "draw these from tests/sample/levels.py:\n" + "\n".join(found)
