"""The documented commands run every test file of the repository.

A folder that pytest does not enter holds promises that nobody checks. pytest's own list of folders
to leave out has ``build``, ``dist`` and ``venv`` in it, so one is easily named wrongly.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Notes each file that would be collected, and imports none.
PLUGIN = """
import pathlib
import pytest

FILES = []

class Unread(pytest.Module):
    def collect(self):
        FILES.append(self.nodeid)
        return []

def pytest_pycollect_makemodule(module_path, parent):
    return Unread.from_parent(parent, path=module_path)

def pytest_collection_finish(session):
    pathlib.Path({out!r}).write_text("\\n".join(FILES))
"""


def on_disk(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}


def collected(root: Path, arguments: list[str], tmp_path: Path) -> list[str]:
    """The files that pytest collects with these arguments."""
    out = tmp_path / "files"
    (tmp_path / "note_files.py").write_text(PLUGIN.format(out=str(out)))
    command = [
        sys.executable, "-m", "pytest", *arguments, "--collect-only", "-qq",
        "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "note_files",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout[-2000:] + done.stderr
    return out.read_text().splitlines()


def is_full(code: str) -> bool:
    """Whether all tests of a file have the marker ``full``, so that ``make test`` runs none."""
    body = ast.parse(code).body
    tests = [node for node in body if getattr(node, "name", "").lower().startswith("test")]
    marks = [[ast.unparse(each) for each in node.decorator_list] for node in tests]
    of_all = [
        ast.unparse(node.value) for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]  # fmt: skip
    return "mark.full" in "".join(of_all) or all("pytest.mark.full" in each for each in marks)


def pytest_arguments(target: str) -> list[str]:
    """The arguments of the pytest that ``make TARGET`` runs, without those of xdist."""
    shown = subprocess.run(
        ["make", "-n", "-o", ".venv/.ready", target, "WORKERS="],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (words,) = (shlex.split(line) for line in shown.splitlines() if "-m pytest" in line)
    return words[words.index("pytest") + 1 :]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_runs_every_test_file(tmp_path: Path) -> None:
    default, full = pytest_arguments("test"), pytest_arguments("test-full")
    assert default == ["-m", "not full", *full], "test-full leaves nothing out that test runs"
    files = collected(ROOT, default, tmp_path)
    assert sorted(on_disk(ROOT) - set(files)) == []
    texts = {file: (ROOT / file).read_text() for file in files}
    unread = [file for file, text in texts.items() if "mark.full" in text and is_full(text)]
    assert unread == [], "make test runs none of it"


@pytest.mark.parametrize(
    "code",
    ["pytestmark = [pytest.mark.full]\ndef test_it(): pass",
     "@pytest.mark.full\ndef test_it(): pass\n\n@pytest.mark.full\ndef test_more(): pass"],
)  # fmt: skip
def test_a_file_of_which_make_test_runs_nothing_is_found(code: str) -> None:
    assert is_full(code)
    assert not is_full(code.replace("full", "slow", 1))


def test_a_folder_that_pytest_would_leave_out_is_found(tmp_path: Path) -> None:
    """The comparison above can fail: pytest's own defaults leave such a folder out."""
    test = tmp_path / "tests" / "build" / "test_it.py"
    test.parent.mkdir(parents=True)
    test.write_text("def test_it(): pass\n")
    (tmp_path / "tests" / "test_other.py").write_text("def test_other(): pass\n")
    assert collected(tmp_path, ["tests"], tmp_path) == ["tests/test_other.py"]
    assert on_disk(tmp_path) == {"tests/test_other.py", "tests/build/test_it.py"}
