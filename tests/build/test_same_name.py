"""Two installed packages, each with an op called ``plain``: both are built, reported, reachable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample import child, forks, install, known
from sample.package import Package

from opkiln.machine.toolchain import host

pytestmark = pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")

NAMES = ["plain", "two.ops:plain"]  # as ALL_OPS lists them; two.ops is the second to be found


class Two:
    """An opkiln without ops of its own, and the packages ``one-ops`` and ``two.ops``."""

    def __init__(self, where: Path) -> None:
        self.opkiln = install.copy_of_opkiln(where / "opkiln", ops=()) / "src"
        self.cache = known.make_store(where / "cache")
        self.packages = [
            Package("plain", where / "first", "one_ops"),
            Package("plain", where / "second", "two_ops_package"),
        ]
        for package, distribution in zip(self.packages, ("one-ops", "two.ops"), strict=True):
            info = package.where / f"{distribution}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
            )
            (info / "entry_points.txt").write_text(
                f"[opkiln.ops]\nplain = {package.name}.op:PlainBuilder\n"
            )

    def python(
        self, *arguments: str, status: int | None = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        paths = [self.opkiln, *(package.where for package in self.packages)]
        done = child.finish(forks.Fork(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)),
                 "OPKILN_CACHE_DIR": str(self.cache), **environment},
        ))  # fmt: skip
        assert status in (None, done.returncode), done.stdout + done.stderr
        return done

    def opkiln_(self, *arguments: str, status: int | None = 0) -> str:
        return self.python("-m", "opkiln", *arguments, status=status).stdout

    def json(self, *arguments: str, status: int | None = 0) -> Any:
        return json.loads(self.opkiln_(*arguments, "--json", status=status))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    """Both, before anything is built."""
    return Two(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def built(two: Two) -> Two:
    """Both, with both built: a lookup where another test has built them already."""
    two.opkiln_("build", "--all")
    return two


def test_build_all_builds_both_ops_and_tells_them_apart(two: Two) -> None:
    found = two.json("build", "--all")["ops"]
    assert [each["op"] for each in found] == NAMES
    assert [Path(each["path"]).parts[-6] for each in found] == ["one_ops", "two_ops_package"]
    lines = two.opkiln_("build", "--all").splitlines()[1:]
    assert [line.split()[0] for line in lines] == NAMES


def test_every_command_takes_a_distribution_in_any_spelling(built: Two) -> None:
    for name in ("two.ops", "two_ops_package"):  # the others are those of the commands below
        (checked,) = built.json("check", f"{name}:plain")["ops"]
        assert checked["status"] == "cached"
        assert "/two_ops_package/plain/" in checked["path"]
    (made,) = built.json("build", "two-ops:plain")["ops"]
    assert "/two_ops_package/plain/" in made["path"]
    assert "two_ops_package" in built.opkiln_("explain", "Two.Ops:plain")
    assert str(built.packages[1].path) in built.opkiln_("plan", "two_ops:plain")


def test_report_and_check_know_both(built: Two) -> None:
    ops = built.json("report")["ops"]
    assert [each["op"] for each in ops] == NAMES
    assert [each["distribution"] for each in ops] == ["one_ops", "two_ops_package"]
    assert [each["op"] for each in built.json("check", *NAMES)["ops"]] == NAMES


def test_python_reaches_both_by_distribution(built: Two) -> None:
    code = """
import opkiln
print(*opkiln.ALL_OPS)
for name in ("plain", "one-ops:plain", "two_ops:plain"):
    package = opkiln.get_builder(name).distribution
    print(package, f"/{package}/plain/" in str(opkiln.explain(name)))
    assert name in opkiln.ALL_OPS
"""
    lines = built.python("-c", code).stdout.splitlines()
    assert lines == [
        " ".join(NAMES), "one_ops True", "one_ops True", "two_ops_package True",
    ]  # fmt: skip


def test_a_record_of_both_builds_both(built: Two, tmp_path: Path) -> None:
    record = tmp_path / "ops.jsonl"
    code = """
import opkiln
for name in ("two-ops:plain", "plain"):
    opkiln.get_builder(name).load()
"""
    built.opkiln_("cache", "record", str(record), "--", sys.executable, "-c", code)
    found = built.json("build", "--recorded", str(record))["ops"]
    assert sorted(each["op"] for each in found) == NAMES


def test_doctor_knows_both_and_the_prebuilt_library_of_one_is_not_taken_for_the_others(
    built: Two, tmp_path: Path
) -> None:
    layer = tmp_path / "wheel"
    built.opkiln_("build", "two-ops:plain", "--out", str(layer))
    place = built.packages[1].path / "prebuilt"
    place.parent.mkdir(exist_ok=True)
    layer.rename(place)
    try:
        findings = built.json("doctor", "--no-build", status=None)["findings"]
    finally:
        place.rename(layer)
    checks = {each["check"]: each for each in findings}
    assert checks["ops"]["verdict"] == "PASS", checks["ops"]
    assert "2 of other packages" in checks["ops"]["evidence"]
    assert "that of two.ops is two.ops:plain" in checks["ops"]["evidence"]
    assert "used: two.ops:plain" in checks["prebuilt"]["evidence"], checks["prebuilt"]


def test_cache_commands_tell_the_ops_apart(built: Two, tmp_path: Path) -> None:
    listed = built.json("cache", "list")["entries"]
    assert [(each["distribution"], each["name"]) for each in listed] == [
        ("one_ops", "plain"), ("two_ops_package", "plain"),
    ]  # fmt: skip
    shown = built.opkiln_("cache", "list").splitlines()
    assert shown[0].split()[:2] == ["op", "package"]
    assert [line.split()[1] for line in shown[1:]] == ["one_ops", "two_ops_package"]
    bundle = tmp_path / "one.bundle"
    written = built.json("cache", "export", str(bundle), "--op", "two-ops:plain")
    assert written["entries"] == 1
    cleared = built.json("cache", "clear", "--yes", "--op", "Two_Ops:plain")["removed"]
    ops = [each["directory"] for each in cleared if each["kind"] == "op"]
    assert len(ops) == 1
    assert "/two_ops_package/plain/" in ops[0]
    assert built.json("check", "plain")["ops"][0]["status"] == "cached"
    assert built.json("check", "two-ops:plain", status=1)["ops"][0]["status"] == "would compile"
    (taken,) = built.json("cache", "import", str(bundle))["entries"]
    assert taken["distribution"] == "two_ops_package"
