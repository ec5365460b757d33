"""The workflows of the code host cannot run here. What they run is what people run: targets of the
Makefile, and actions that are pinned by their commit. ``make release-check`` holds them against the
schema of their format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^(\w+)\s*\?=", MAKEFILE, re.MULTILINE))

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def test_there_is_a_workflow_for_tests_for_docs_and_for_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "test"]


@each_workflow
def test_every_command_of_a_workflow_is_a_target_of_the_makefile(path: Path) -> None:
    commands = [step["run"] for step in steps(path) if "run" in step]
    assert commands
    for command in commands:
        make, target = command.split()
        assert (make, target in TARGETS) == ("make", True), command


@each_workflow
def test_every_variable_of_a_workflow_is_one_that_the_makefile_reads(path: Path) -> None:
    given = [job.get("env", {}) for job in jobs(path).values()]
    given += [step.get("env", {}) for step in steps(path)]
    assert {name for variables in given for name in variables} <= VARIABLES


@each_workflow
def test_every_action_is_pinned_to_a_commit_with_its_version_beside_it(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text())
    assert len(used) == sum("uses" in step for step in steps(path))
    for each in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each


def test_an_action_has_one_version_in_all_workflows() -> None:
    used = [step["uses"] for path in WORKFLOWS for step in steps(path) if "uses" in step]
    pinned = {each.partition("@")[0]: each for each in used}
    assert set(used) == set(pinned.values())


@each_workflow
def test_a_checkout_keeps_no_credentials(path: Path) -> None:
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@each_workflow
def test_a_job_that_may_write_runs_no_code_of_the_repository(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        if "write" in job.get("permissions", {}).values():
            assert not any("run" in step for step in job["steps"]), name
            assert not any("checkout" in step["uses"] for step in job["steps"]), name


def test_a_release_is_published_by_the_identity_of_its_workflow_after_it_was_checked() -> None:
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    assert [step["run"] for step in release["build"]["steps"] if "run" in step] == [
        "make release-check"
    ]
    assert (release["attest"]["needs"], release["publish"]["needs"]) == ("build", "attest")
    assert release["publish"]["permissions"] == {"id-token": "write"}
    given = release["publish"]["steps"][-1]["with"]
    assert given == {"attestations": True}, "no password: the index trusts this workflow"


@each_workflow
def test_every_job_has_a_time_limit(path: Path) -> None:
    for name, job in jobs(path).items():
        assert job["timeout-minutes"] <= 180, name
