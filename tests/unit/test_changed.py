"""``make test-changed``: which test files a change can touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import changed
import pytest

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "src/opkiln/__init__.py": "",
    "src/opkiln/__main__.py": "from opkiln.cli import main",
    "src/opkiln/extension.py": "from opkiln.base import digest",
    "src/opkiln/base/digest.py": "",
    "src/opkiln/report.py": "",
    "src/opkiln/cli/__init__.py": "",
    "src/opkiln/cli/main.py": "import_module(f'opkiln.cli.{name}')",
    "src/opkiln/cli/report.py": "from opkiln import report",
    "src/opkiln/ops/x.h": "",
    "tests/conftest.py": "",
    "tests/sample/__init__.py": "",
    "tests/sample/tree.py": "from opkiln import extension",
    "tests/unit/test_digest.py": "from opkiln.base.digest import sha256_file",
    "tests/unit/test_report.py": "from opkiln import report",
    "tests/build/test_load.py": "import opkiln\nopkiln.load('x')",
    "tests/build/test_tree.py": "from sample import tree",
    "tests/build/test_child.py": "run('from opkiln.base.digest import it')",
    "tests/build/test_command.py": "start('-m', 'opkiln', 'report')",
    "tests/build/test_pages.py": "read('docs')",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "chosen"),
    [
        ("src/opkiln/base/digest.py", "test_child test_load test_tree test_digest"),
        ("src/opkiln/extension.py", "test_load test_tree"),
        ("src/opkiln/report.py", "test_command test_report"),
        ("src/opkiln/cli/report.py", "test_command"),
        ("tests/sample/tree.py", "test_tree"),
        ("tests/unit/test_report.py", "test_report"),
        ("docs/index.md", "test_pages"),
    ],
)
def test_files_that_use_a_changed_module_are_chosen(root: Path, path: str, chosen: str) -> None:
    names = [each.rpartition("/")[2] for each in changed.choose([path], root)]
    assert names == [f"{name}.py" for name in chosen.split()]


@pytest.mark.parametrize(
    "path", ["src/opkiln/ops/x.h", "tests/conftest.py", "pyproject.toml", "src/opkiln/gone.py"]
)
def test_all_are_chosen_where_it_is_in_doubt(root: Path, path: str) -> None:
    assert changed.choose(["tests/unit/test_digest.py", path], root) == changed.EVERYTHING


def test_no_change_chooses_none(root: Path) -> None:
    assert changed.choose([], root) == []
