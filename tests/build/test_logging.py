"""The logger ``opkiln``: how a build gets on, for services that route what they are told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from sample import child

from opkiln.machine.toolchain import host

if TYPE_CHECKING:
    from pathlib import Path

    from sample.package import Package

pytestmark = pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")

LOAD = """
import sys
from {name}.op import PlainBuilder
assert PlainBuilder().load().add(2, 3) >= 5
print("logging" in sys.modules)
"""
TO_FILE = """
import json, logging
class Handler(logging.FileHandler):
    def format(self, record):
        assert record.name == "opkiln"
        data = getattr(record, "opkiln", None)
        return json.dumps([record.levelname, record.getMessage(), data], default=str)
logger = logging.getLogger({logger!r})
logger.setLevel({level!r})
logger.addHandler(Handler({file!r}))
"""


def load(plain: Package, before: str = "", **environment: str) -> tuple[str, list[str]]:
    """Load the op in a new process: (what it printed, the lines on its standard error)."""
    code = before + LOAD.format(name=plain.name)
    done = child.finish(child.start(code, path=[plain.where], env=environment, forked=False))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.splitlines()


def test_a_build_without_logging_reports_on_standard_error_and_a_hit_imports_none(
    plain: Package,
) -> None:
    _, said = load(plain)
    assert said[0] == "building plain (4 steps)"
    assert said[1].startswith("built plain in ")
    assert len(said) == 2
    printed, said = load(plain)
    assert (printed, said) == ("False", [])


def test_a_process_that_imports_logging_and_configures_nothing_is_told_as_before(
    plain: Package,
) -> None:
    printed, said = load(plain, "import logging\n")
    assert printed == "True"
    assert [line.split()[0] for line in said] == ["building", "built"]


@pytest.mark.parametrize("logger", ["", "opkiln"])
def test_a_logger_with_a_handler_gets_the_lines_in_the_place_of_standard_error(
    plain: Package, tmp_path: Path, logger: str
) -> None:
    file = tmp_path / "service.log"
    _, said = load(plain, TO_FILE.format(logger=logger, level="INFO", file=str(file)))
    assert said == []
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [level for level, _, _ in records] == ["INFO", "INFO"]
    assert records[0][1] == "building plain (4 steps)"
    assert records[0][2] == {"event": "build-start", "op": "plain", "steps": 4}
    assert records[1][1].startswith("built plain in ")


@pytest.mark.counts_compiles
def test_a_logger_that_debugs_gets_the_commands(plain: Package, tmp_path: Path) -> None:
    file = tmp_path / "service.log"
    load(plain, TO_FILE.format(logger="opkiln", level="DEBUG", file=str(file)))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    commands = [text for level, text, data in records if data["event"] == "command"]
    assert any("add.cpp" in text for text in commands), records
    assert {level for level, _, data in records if data["event"] == "command"} == {"DEBUG"}
    assert {data["event"] for _, _, data in records} >= {"step-start", "step-end", "build-end"}


def test_lines_that_were_asked_for_are_told_beside_the_logger(
    plain: Package, tmp_path: Path
) -> None:
    file = tmp_path / "service.log"
    before = TO_FILE.format(logger="opkiln", level="INFO", file=str(file))
    _, said = load(plain, before, OPKILN_PROGRESS="lines")
    assert len(said) == 2
    assert len(file.read_text().splitlines()) == 2


def test_a_build_that_fails_is_a_warning_of_the_logger(plain: Package, tmp_path: Path) -> None:
    plain.edit("csrc/add.cpp", "int add(", "itn add(")
    file = tmp_path / "service.log"
    before = TO_FILE.format(logger="opkiln", level="INFO", file=str(file))
    code = before + LOAD.format(name=plain.name)
    done = child.finish(child.start(code, path=[plain.where]))
    assert "CompileError" in done.stderr
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert records[-1][0] == "WARNING"
    assert records[-1][1].startswith("failed plain after ")


@pytest.mark.counts_compiles
def test_verbose_progress_shows_each_command(plain: Package) -> None:
    _, said = load(plain, OPKILN_PROGRESS="verbose")
    commands = [line for line in said if line.startswith("+ ")]
    assert sum("/add.cpp" in line for line in commands) == 1
    assert said[-1].startswith("built plain in ")
