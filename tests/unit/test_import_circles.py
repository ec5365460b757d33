"""The check for import circles: it finds each kind of import, and opkiln has no circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import import_circles
import pytest

import opkiln

TYPE_CHECKING_IMPORT = """
TYPE_CHECKING = False
if TYPE_CHECKING:
    from sample_package.a import A
"""


def package(where: Path, **sources: str) -> Path:
    """A package with these modules; ``room__a`` is ``room/a.py``."""
    root = where / "sample_package"
    for name, source in sources.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for folder in [root, *(each for each in root.rglob("*") if each.is_dir())]:
        (folder / "__init__.py").touch()
    return root


def members(root: Path) -> list[tuple[str, ...]]:
    return [circle.members for circle in import_circles.find(root)]


@pytest.mark.parametrize(
    "back",
    [
        "import sample_package.a\n",
        "from sample_package import a\n",
        "from sample_package.a import A\n",
        "from . import a\n",
        "from .a import A\n",
        "def f():\n    from sample_package.a import A\n",
        TYPE_CHECKING_IMPORT,
    ],
    ids=["import", "from package", "from module", "relative", "relative name", "function", "types"],
)
def test_a_circle_of_two_modules_is_found_whatever_the_form_of_the_import(
    tmp_path: Path, back: str
) -> None:
    root = package(tmp_path, a="from sample_package import b\n", b=back, c="import os\n")
    assert members(root) == [("sample_package.a", "sample_package.b")]


def test_a_circle_through_a_third_module_is_one_circle_with_its_three_imports(
    tmp_path: Path,
) -> None:
    root = package(
        tmp_path,
        a="from sample_package import b\n",
        b="import os\nfrom sample_package import c, outside\n",
        c="from sample_package.a import A\n",
        outside="",
    )
    (circle,) = import_circles.find(root)
    assert circle.members == ("sample_package.a", "sample_package.b", "sample_package.c")
    assert [str(each) for each in circle.imports] == [
        "sample_package.a -> sample_package.b  (sample_package/a.py:1)",
        "sample_package.b -> sample_package.c  (sample_package/b.py:2)",
        "sample_package.c -> sample_package.a  (sample_package/c.py:1)",
    ]


def test_two_folders_that_import_each_other_are_a_circle_without_one_among_modules(
    tmp_path: Path,
) -> None:
    root = package(
        tmp_path,
        low__a="from sample_package.high import b\n",
        low__c="",
        high__b="",
        high__d="from sample_package.low import c\n",
    )
    assert members(root) == [("sample_package.high", "sample_package.low")]


def test_a_folder_and_its_own_init_file_can_be_a_circle(tmp_path: Path) -> None:
    root = package(tmp_path, room__a="from sample_package.room import name\n")
    (root / "room" / "__init__.py").write_text("from sample_package.room.a import A as name\n")
    assert members(root) == [("sample_package.room", "sample_package.room.a")]


def test_imports_that_all_point_downward_are_no_circle(tmp_path: Path) -> None:
    root = package(
        tmp_path,
        high__a="from sample_package.high import b\nfrom sample_package.low import c\n",
        high__b="from sample_package.low.c import C\n",
        low__c="import os, json\n",
    )
    assert members(root) == []


def test_the_command_prints_a_circle_and_fails(tmp_path: Path) -> None:
    root = package(tmp_path, a="from . import b\n", b="from . import a\n")
    command = [sys.executable, import_circles.__file__, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("import circle: sample_package.a, sample_package.b\n")


def test_the_check_reads_opkiln() -> None:
    """`make lint` runs it."""
    assert Path(opkiln.__file__).parent == import_circles.PACKAGE
    assert (
        "tests/import_circles.py\n" in (import_circles.PACKAGE.parents[1] / "Makefile").read_text()
    )


def test_type_checkers_see_the_names_that_the_package_exports() -> None:
    stub = ast.parse((import_circles.PACKAGE / "__init__.pyi").read_text())
    named = [node.target for node in stub.body if isinstance(node, ast.AnnAssign)]
    seen = {target.id for target in named if isinstance(target, ast.Name)}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            seen |= {alias.asname or alias.name for alias in node.names}
    assert seen == set(opkiln.__all__)
