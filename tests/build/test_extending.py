"""docs/extending.md: its examples, applied to a copy of the package, work."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from sample import child

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()

_ADDED = re.compile(r"<!-- add: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
_CHANGED = re.compile(r"<!-- in: (\S+) -->\n```diff\n(.*?)```", re.DOTALL)
_RUN = re.compile(r"<!-- run: (\w+) -->\n```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
EXAMPLES = {name: (code, shown) for name, code, shown in _RUN.findall(PAGE)}


def changed(text: str, diff: str) -> str:
    """A text after a diff without line numbers; what it changes must be there once."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"there once:\n{before}"
    return text.replace(before, after)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with everything that the page adds."""
    where = tmp_path_factory.mktemp("extended")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", where / "src", ignore=ignored)
    for name in ("pyproject.toml", "tests/unit/test_settings.py"):
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, where / name)
    for name, text in _ADDED.findall(PAGE):
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text)
    for name, diff in _CHANGED.findall(PAGE):
        (where / name).write_text(changed((where / name).read_text(), diff))
    return where


def run(copy: Path, code: str, *paths: Path, **variables: str) -> str:
    path = os.pathsep.join(map(str, (copy / "src", *paths)))
    return child.run(code, env={"PYTHONPATH": path, **variables}, bare=False)


def test_the_page_has_an_example_of_each_kind() -> None:
    assert set(EXAMPLES) == {"op", "accelerator", "setting"}
    assert len(_ADDED.findall(PAGE)) == PAGE.count("<!-- add: ")
    assert len(_CHANGED.findall(PAGE)) == PAGE.count("<!-- in: ")


def test_the_op_is_built_and_agrees_with_its_reference(copy: Path) -> None:
    code, shown = EXAMPLES["op"]
    assert run(copy, code, OPKILN_MODE="native") == shown
    listed = "import opkiln; print('relu_squared' in opkiln.ALL_OPS)"
    assert run(copy, listed) == "True\n"


def test_the_accelerator_is_found_by_its_entry_point_if_its_device_is_there(copy: Path) -> None:
    code, shown = EXAMPLES["accelerator"]
    package = copy / "numa_package"
    info = package / "numa_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numa-package\nVersion: 1.0\n")
    (group,) = re.findall(
        r'entry-points\."([\w.]+)"]\n(.*)', (package / "pyproject.toml").read_text()
    )
    (info / "entry_points.txt").write_text("[{}]\n{}\n".format(*group).replace('"', ""))
    machine = copy / "machine"
    prefix = f"from opkiln.accelerator import detect; detect.ROOT = {str(machine)!r}\n"
    absent = "import opkiln; print(opkiln.get_accelerator().name)"
    assert run(copy, prefix + absent, package, CUDA_VISIBLE_DEVICES="") == "cpu\n"
    for node in ("node0", "node1"):
        (machine / "sys" / "devices" / "system" / "node" / node).mkdir(parents=True)
    assert run(copy, prefix + code, package) == shown
    assert run(copy, prefix + code, package, OPKILN_ACCELERATOR="numa") == shown


def test_the_setting_is_read_refused_and_documented(copy: Path) -> None:
    code, shown = EXAMPLES["setting"]
    assert run(copy, code, OPKILN_NICE="5") == shown
    refused = (
        "from opkiln.errors import SettingError\n"
        "from opkiln.settings import settings\n"
        "try:\n    settings.nice\n"
        "except SettingError as error:\n    print(error.hint)\n"
    )
    assert run(copy, refused, OPKILN_NICE="much") == "unset OPKILN_NICE\n"
    page = "from reference_pages import settings; print(settings.page())"
    assert "`OPKILN_NICE`" in run(copy, page, ROOT / "tests")
    tests = f"import pytest; print(pytest.main(['-q', {str(copy / 'tests' / 'unit')!r}]))"
    said = run(copy, tests, ROOT / "tests")
    assert said.endswith("\n0\n"), said


def test_the_table_of_a_backend_lists_every_file_that_names_it() -> None:
    source = ROOT / "src" / "opkiln"
    named = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"^XPU = |import [^#]*\bXPU\b|^    XPU,$", path.read_text(), re.MULTILINE)
    }
    table = PAGE.partition("## A backend")[2].partition("A backend whose devices")[0]
    listed = set(re.findall(r"`([\w/]+\.py)`", table))
    assert named - listed == set()
    assert all((source / name).exists() for name in listed)
