"""What packages were installed with, under the eyes of the doctor and in the report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import command
from sample.child import SOURCE
from sample.doctor import Patient
from sample.shipped import Shipped, announce

if TYPE_CHECKING:
    from sample.package import Package


@pytest.fixture
def shipped(plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    announce(plain, "plain", "PlainBuilder")
    return Shipped(plain, "csrc/add.cpp", tmp_path, monkeypatch)


def patient(shipped: Shipped, *more: Path, **env: str) -> Patient:
    path = os.pathsep.join(map(str, [SOURCE, shipped.package.where, *more]))
    return Patient({"PYTHONPATH": path, **env})


def report(shipped: Shipped, *arguments: str, **env: str) -> str:
    return command.run("report", *arguments, **env).stdout


def row(shipped: Shipped, **env: str) -> dict[str, Any]:
    (found,) = (each for each in json.loads(report(shipped, "--json", **env))["ops"]
                if each["op"] == "plain")  # fmt: skip
    return {**found, **found["backends"][0]}


# The doctor


def test_nothing_that_is_installed_is_nothing_wrong(shipped: Shipped) -> None:
    found = patient(shipped).check("prebuilt")
    assert found.verdict == "PASS"
    assert found.evidence == "no package was installed with prebuilt ops"


def test_what_serves_is_listed(shipped: Shipped, tmp_path: Path) -> None:
    shipped.build()
    found = patient(shipped).check("prebuilt")
    assert (found.verdict, found.evidence) == ("PASS", "used: plain")
    assert shipped.opened == []


def test_an_op_of_a_wheel_of_ops_is_listed_too(shipped: Shipped, tmp_path: Path) -> None:
    site = tmp_path / "site"
    shipped.build(site / "opkiln_prebuilt" / "plain_ops")
    found = patient(shipped, site).check("prebuilt")
    assert (found.verdict, found.evidence) == ("PASS", "used: plain")


def test_a_stale_one_is_a_warning_with_its_reason_and_a_build_mends_it(shipped: Shipped) -> None:
    shipped.build()
    shipped.package.edit("csrc/add.cpp", "a + b", "a - b")
    ill = patient(shipped)
    found = ill.check("prebuilt")
    assert found.verdict == "WARN"
    assert found.evidence == "plain is refused: csrc/add.cpp changed"
    assert found.command == "opkiln build plain"
    mended = ill.check("prebuilt", after=found.command)
    assert mended.verdict == "PASS"
    assert mended.evidence == ("plain is refused, and a cached build is used: csrc/add.cpp changed")


def test_a_damaged_one_is_to_be_installed_again_by_the_name_that_brought_it(
    shipped: Shipped, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    own = shipped.build() / "plain.so"
    own.write_bytes(own.read_bytes()[:-1])
    found = patient(shipped).check("prebuilt")
    assert found.verdict == "WARN"
    assert found.evidence == "plain is refused: damaged: plain.so has the wrong digest"
    again = " -m pip install --force-reinstall --no-deps "
    assert found.command.endswith(f"{again}{shipped.package.name}")
    own.unlink()
    theirs = shipped.build(site / "opkiln_prebuilt" / "plain_ops") / "plain.so"
    theirs.write_bytes(theirs.read_bytes()[:-1])
    for path in sorted((shipped.package / "prebuilt").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    found = patient(shipped, site).check("prebuilt")
    assert found.verdict == "WARN"
    assert found.command.endswith(f"{again}plain_ops")


def test_one_that_needs_what_this_cpu_lacks_is_a_warning(shipped: Shipped, tmp_path: Path) -> None:
    from sample.shipped import rewrite

    rewrite(shipped.build(), lambda manifest: manifest["needs"].update(cpu=["future_isa"]))
    found = patient(shipped).check("prebuilt")
    assert found.verdict == "WARN"
    assert found.evidence == "plain is refused: it needs future_isa, which this CPU lacks"


def test_off_is_said(shipped: Shipped) -> None:
    shipped.build()
    found = patient(shipped, OPKILN_MODE="source").check("prebuilt")
    assert found.verdict == "SKIP"
    assert found.evidence == "OPKILN_MODE=source: plain is installed but not used"


def test_a_package_that_cannot_be_imported_is_left_to_the_check_of_ops(shipped: Shipped) -> None:
    shipped.build()
    (shipped.package / "__init__.py").write_text("import os; os.abort()\n")
    assert patient(shipped).check("prebuilt").verdict == "PASS"
    assert patient(shipped).check("ops").verdict == "WARN"


# The report


def test_the_report_and_its_page_say_that_it_is_installed(shipped: Shipped, tmp_path: Path) -> None:
    leaf = shipped.build()
    found = row(shipped)
    assert (found["installed"], found["cached"], found["compatible"]) == (True, True, True)
    assert (found["status"], found["path"]) == ("cached", str(leaf / "plain.so"))
    assert "plain cpu yes yes yes" in " ".join(report(shipped).split())
    page = tmp_path / "page.html"
    report(shipped, "--html", str(page))
    text = page.read_text()
    grid = text[text.index('<th scope="row">plain ') :].partition("</tr>")[0]
    assert '<td class="ready" title="">installed <span title="serves here">' in grid


def test_the_report_says_why_what_is_installed_does_not_serve(shipped: Shipped) -> None:
    shipped.build()
    shipped.package.edit("csrc/add.cpp", "a + b", "a - b")
    found = row(shipped)
    assert (found["installed"], found["status"]) == (False, "would compile")
    assert found["reason"] == "csrc/add.cpp changed: its first use builds it"


def test_one_that_the_store_has_is_cached_and_not_installed(shipped: Shipped) -> None:
    shipped.load()
    found = row(shipped)
    assert (found["installed"], found["cached"]) == (False, True)
