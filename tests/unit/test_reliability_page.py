"""docs/reliability.md says what the kept runs found, no more and no less."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


def kept(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "bench" / "results" / name).read_text())
    return found


def test_its_table_is_that_of_the_kept_run_in_which_nothing_failed() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| ([\d,]+) \|", PAGE, re.MULTILINE)
    assert [(int(n), what, int(tried.replace(",", ""))) for n, what, tried in rows] == [
        (row["row"], row["behaviour"], row["tried"]) for row in kept("faults.json")
    ]
    assert len(rows) == 32
    assert sum(row["failed"] for row in kept("faults.json")) == 0


def test_its_crash_points_are_those_that_were_tried_and_none_was_bad() -> None:
    points = kept("crash_points.json")
    assert f"tries {sum(each['tried'] for each in points)} points" in PAGE
    assert sum(each["bad"] for each in points) == 0


def test_its_executions_are_those_of_the_kept_fuzzing_and_nothing_is_open() -> None:
    parsers = kept("fuzz.json")
    assert f"{sum(each['executions'] for each in parsers):,} executions" in PAGE
    assert (len(parsers), sum(each["findings"] for each in parsers)) == (13, 0)


def test_every_test_that_a_case_names_exists() -> None:
    cases = PAGE.partition("\n## What got through before\n")[2]
    rows = [line for line in cases.splitlines() if line.startswith("| ") and "Case |" not in line]
    assert len(rows) > 30
    for row in rows:
        tests = row.rpartition(" | ")[2]
        files = re.findall(r"`((?:build|faults|unit)/test_\w+\.py)`", tests)
        assert files, row
        texts = "".join((ROOT / "tests" / each).read_text() for each in files)
        for name in re.findall(r"`…?(_?\w+?)_?…?`", tests.replace(".py`", "")):
            assert name in texts, f"{name} is not in {files}"
