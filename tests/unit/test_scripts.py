"""Scripts that no run of the tests starts: benchmarks, GPU checks, clusters, examples."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from opkiln.errors import UsageError

ROOT = Path(__file__).parents[2]
RUN = ("unit", "build", "ops", "faults", "cluster", "sample")  # in every run of the tests
FILES = sorted(
    path
    for folder in ("bench", "examples", "tests", "docs")
    for path in (ROOT / folder).rglob("*.py")
    if path.relative_to(ROOT).parts[:2] not in {("tests", each) for each in RUN}
)
IMPORTS = re.compile(r"^\s*(from|import) .*\bopkiln\b", re.MULTILINE)


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Modules of opkiln that a file imports, and the names that it takes from them."""
    text = path.read_text()
    if not IMPORTS.search(text):
        return
    nodes = list(ast.walk(ast.parse(text, str(path))))
    for_types = {
        each
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in node.body
    }
    for node in nodes:
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "opkiln":
            assert node.module is not None
            yield from ((node.module, each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "opkiln":
                    yield each.name, ""


def is_there(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "opkiln":
            return False
        raise
    except UsageError:  # DeepSpeed is not here
        return True
    if not name or hasattr(found, name):
        return True
    return hasattr(found, "__path__") and bool(importlib.util.find_spec(f"{module}.{name}"))


def test_names_that_scripts_take_from_opkiln_are_there() -> None:
    pytest.importorskip("torch")
    wanted: dict[tuple[str, str], Path] = {}
    for path in FILES:
        for each in imported(path):
            wanted.setdefault(each, path)
    assert len(wanted) > 100
    missing = [
        f"{path.relative_to(ROOT)}: from {module} import {name}"
        for (module, name), path in wanted.items()
        if not is_there(module, name)
    ]
    assert not missing
