"""The CI files that ``opkiln new`` writes and the docs show, against the services' own schemas.
``test_new.py`` runs the commands in them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from environments import ready

from opkiln.ship import scaffold

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "continuous-integration.md"
VENV = ROOT / ".ci-files-venv"
SCHEMAS = {
    ".github/workflows/test.yml": "vendor.github-workflows",
    ".gitlab-ci.yml": "vendor.gitlab-ci",
}
_YAML = re.compile(r"```yaml\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def tools() -> Path:
    """The programs of an environment of its own."""
    if reason := ready(VENV, ("check-jsonschema",)):
        pytest.skip(reason)
    return VENV / "bin"


def written(where: Path, ci: str = scaffold.GITHUB) -> Path:
    scaffold.write("demo_ops", str(where), ci=ci)
    return where / "demo_ops"


def run(argv: list[object], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in argv], cwd=cwd, env={**os.environ, **variables}, timeout=300,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_page_shows_what_opkiln_new_writes(tmp_path: Path) -> None:
    shown = _YAML.findall(PAGE.read_text())
    for each in scaffold.CI:
        (tmp_path / each).mkdir()
    github, gitlab = (written(tmp_path / each, each) for each in scaffold.CI)
    files = [github / ".github/workflows/test.yml", gitlab / ".gitlab-ci.yml"]
    assert shown == [each.read_text() for each in files]


def test_a_ci_service_is_chosen_or_none(tmp_path: Path) -> None:
    for ci, expected in (("github", {".github/workflows/test.yml"}),
                         ("gitlab", {".gitlab-ci.yml"}), ("none", set())):  # fmt: skip
        (tmp_path / ci).mkdir()
        files = scaffold.write("demo_ops", str(tmp_path / ci), ci=ci)
        found = {each for each in files if each in SCHEMAS}
        assert found == expected
        readme = (tmp_path / ci / "demo_ops" / "README.md").read_text()
        assert {each for each in SCHEMAS if each in readme} == expected


@pytest.mark.full
def test_the_files_are_what_the_services_take(tmp_path: Path, tools: Path) -> None:
    for ci, (_, place) in scaffold.CI.items():
        (tmp_path / ci).mkdir()
        file = written(tmp_path / ci, ci) / place
        check = [tools / "check-jsonschema", "--builtin-schema", SCHEMAS[place]]
        done = run([*check, file], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        # The schema is one that can say no.
        wrong = yaml.safe_load(file.read_text())
        job = wrong["jobs"]["test"] if ci == "github" else wrong["test"]
        job["steps" if ci == "github" else "script"] = {"run": 1}
        file.write_text(yaml.safe_dump(wrong))
        assert run([*check, file], tmp_path).returncode == 1
