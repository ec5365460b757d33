"""What a release says of itself is said once, and the files around the code agree with it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import opkiln
from opkiln.base.model import STABLE_VERSION
from opkiln.builder.registry import ALL_OPS, bundled_ops, libraries

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "torches"))

import cpu_ops  # noqa: E402 (found by the line above)
import torches_page as torches  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHANGES = (ROOT / "CHANGELOG.md").read_text()
PAGE = torches.PAGE.read_text()
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_the_version_is_written_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", opkiln.__version__)
    assert "version" in PROJECT["project"]["dynamic"]
    written = f"__version__ = {opkiln.__version__!r}".replace("'", '"')
    assert written in (ROOT / "src" / "opkiln" / "__init__.py").read_text()
    for name in ("pyproject.toml", "setup.py", "CITATION.cff", "README.md"):
        assert opkiln.__version__ not in (ROOT / name).read_text(), name


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    first, *released = re.findall(r"^## (.*)$", CHANGES, re.MULTILINE)
    assert first == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", each) for each in released)
    assert released[0].startswith(f"[{opkiln.__version__}] ")


def test_every_part_of_the_changelog_has_one_of_the_known_kinds() -> None:
    parts = re.findall(r"^### (.*)$", CHANGES, re.MULTILINE)
    assert parts[: len(KINDS)] == list(KINDS), "those of [Unreleased]: others add lines there"
    assert set(parts) == set(KINDS)


def test_commits_are_checked_by_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    shown = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/.ready", "lint"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert [shlex.split(hook["entry"]) for hook in hooks] == [
        shlex.split(line) for line in shown.splitlines()
    ]


def test_the_table_of_torches_is_that_of_the_kept_run_in_which_all_passed() -> None:
    result = json.loads(torches.RESULTS.read_text())
    assert torches.with_table(PAGE, result) == PAGE, "run `python tests/torches/torches_page.py`"
    rows = result["rows"]
    assert not any({"failed", "skipped"} & {*row, *row.values()} for row in rows)
    tried = {row["torch"].rpartition(".")[0] for row in rows}
    assert {f"2.{minor}" for minor in range(10, 16)} <= tried


def test_every_op_with_a_kernel_for_cpus_is_called_on_each_torch() -> None:
    with_kernels = {
        name
        for name in bundled_ops()
        if any("cpu" in builder.BACKENDS for _, builder in libraries(name, ALL_OPS[name]))
    }
    assert set(cpu_ops.WORK) == with_kernels


def test_the_page_names_the_oldest_python_and_torch_that_the_code_takes() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert "| Python | 3.11 and later |" in PAGE
    assert f"| torch | {STABLE_VERSION} and later, any build |" in PAGE


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_of_the_files_for_contributors_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_tools_of_a_release_are_pinned() -> None:
    for each in PROJECT["dependency-groups"]["release"]:
        assert re.fullmatch(r"[\w-]+==[\w.]+", each), each
