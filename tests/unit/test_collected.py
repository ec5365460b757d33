"""The documented commands run every test file of the repository.

A folder that pytest does not enter holds promises that nobody checks. pytest's own list of folders
to leave out has ``build``, ``dist`` and ``venv`` in it, so one is easily named wrongly.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Notes each file that was collected, with how many of its tests the command selects. A file that
# skips itself counts as one test: its reason is printed at the end of the run.
PLUGIN = """
import json

FILES = {{}}

def pytest_collectreport(report):
    if report.nodeid.endswith(".py"):
        FILES.setdefault(report.nodeid, int(report.skipped))

def pytest_collection_finish(session):
    for item in session.items:
        FILES[item.nodeid.partition("::")[0]] += 1
    with open({out!r}, "w") as file:
        json.dump(FILES, file)
"""


def on_disk(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}


def collected(root: Path, arguments: list[str], tmp_path: Path) -> dict[str, int]:
    """The files that pytest collects with these arguments, each with the number of its tests."""
    out = tmp_path / "files.json"
    (tmp_path / "note_files.py").write_text(PLUGIN.format(out=str(out)))
    command = [
        sys.executable, "-m", "pytest", *arguments, "--collect-only", "-qq",
        "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "note_files",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, int] = json.loads(out.read_text())
    return found


def pytest_arguments(target: str) -> list[str]:
    """The arguments of the pytest that ``make TARGET`` runs, without those of xdist."""
    shown = subprocess.run(
        ["make", "-n", "-o", ".venv/.ready", target, "JOBS=1"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (words,) = (shlex.split(line) for line in shown.splitlines() if "-m pytest" in line)
    arguments = shlex.join(words[words.index("pytest") + 1 :])
    return shlex.split(arguments.replace("-n 1 --dist loadfile --no-loadscope-reorder", ""))


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_runs_every_test_file(tmp_path: Path) -> None:
    default, full = pytest_arguments("test"), pytest_arguments("test-full")
    assert default == ["-m", "not full", *full], "test-full leaves nothing out that test runs"
    files = collected(ROOT, default, tmp_path)
    assert sorted(on_disk(ROOT) - files.keys()) == []
    assert [file for file, tests in files.items() if not tests] == [], "make test runs none of it"


@pytest.mark.parametrize("folder", ["build", "dist", "venv"])
def test_a_folder_that_pytest_would_leave_out_is_found(folder: str, tmp_path: Path) -> None:
    """The comparison above can fail: pytest's own defaults leave such a folder out."""
    test = tmp_path / "tests" / folder / "test_it.py"
    test.parent.mkdir(parents=True)
    test.write_text("def test_it(): pass\n")
    (tmp_path / "tests" / "test_other.py").write_text("def test_other(): pass\n")
    assert collected(tmp_path, ["tests"], tmp_path) == {"tests/test_other.py": 1}
    assert on_disk(tmp_path) == {"tests/test_other.py", f"tests/{folder}/test_it.py"}
