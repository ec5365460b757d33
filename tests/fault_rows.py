"""The rows of faults that are survived, and the table of a run: what was tried, what failed.

A plugin of tests/conftest.py, not part of tests/faults/conftest.py: with xdist the tests run in
workers, and the process that prints the table loads no conftest below tests/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "faults.json"

ROWS = {
    1: "a killed builder blocks nobody and leaves nothing wrong",
    2: "two torch versions share a cache and build once each",
    3: "nothing outlives a builder, however it ends",
    4: "all who wait for a failing build see the compiler's error",
    5: "one name with other flags at the same time is another library",
    6: "a flipped byte or a cut file is noticed and rebuilt",
    7: "a full disk leaves no part of an entry and is named",
    8: "a hit writes nothing, so a read-only cache serves",
    9: "an edit is seen whatever time it bears",
    10: "wrong clocks and times in the future cause no rebuild",
    11: "a compiler replaced in place causes one rebuild",
    12: "a torch upgraded in place rebuilds full-ABI ops alone",
    13: "different requests have different keys",
    14: "a source edited during its build is never published mixed",
    15: "a foreign CPU's entry is refused with what is lacking",
    16: "a directory of others is refused, a private one is used",
    17: "no link planted in the way is written through",
    18: "nothing is written outside the cache and the scratch",
    19: "a hostile name is a clear error or a safe build",
    20: "odd paths build, or are one clear error",
    21: "only toolchain programs are started, whatever the flags",
    22: "an arch list round-trips or is an ArchError",
    23: "many ranks at once compile once",
    24: "locks that fail or lie cost work, never a load",
    25: "imports and detection create no context, forks are safe",
    26: "a tampered bundle or wheel is refused",
    27: "eviction takes nothing in use, leftovers are swept",
    28: "compilers are bounded by CPUs and memory of the host",
    29: "hidden variables are keyed or dropped, and named",
    30: "a header that shadows another is noticed",
    31: "a network file system costs time, never a load",
    32: "each container identity has its stated outcome",
    33: "flags are refused, or all that they do is seen",
    34: "after any change, the cache serves what an empty cache builds",
    35: "whatever a remote tier sends, a load ends in time and in words",
    36: "what opkiln ninja builds, plain ninja builds from nothing",
}


class Row:
    """What came of one row."""

    def __init__(self) -> None:
        self.tried = 0
        self.failed = 0
        self.seconds = 0.0
        self.skipped: list[str] = []


class Cases:
    """Counts what one test tries. Iterate over it: ``for number in cases(200)``.

    Counts are scaled by one factor: a tenth, or the whole with ``--full-counts``. ``one_in`` makes
    it a smaller part, where a case takes long.
    """

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.number = 0
        self.skipped: list[str] = []

    def count(self, whole: int, least: int = 1, *, one_in: int = 10) -> int:
        """How many cases to try of so many."""
        return whole if self.whole else min(whole, max(least, whole // one_in))

    def tried(self, number: int = 1) -> None:
        """So many cases are about to be tried."""
        self.number += number

    def __call__(self, whole: int, least: int = 1, *, one_in: int = 10) -> Iterator[int]:
        for number in range(self.count(whole, least, one_in=one_in)):
            self.tried()
            yield number

    def skip(self, reason: str) -> None:
        """A part that cannot be tried here; the rest of the test goes on."""
        self.skipped.append(reason)


def outcome(number: int, report: pytest.TestReport, cases: Cases | None) -> dict[str, Any]:
    """What one part of a test (setup, call or teardown) adds to its row, as plain data.

    A worker process sends it to the process that prints the table. A test without cases is one
    case.
    """
    part: dict[str, Any] = {
        "row": number, "tried": 0, "failed": 0, "seconds": report.duration, "skipped": [],
    }  # fmt: skip
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        part["skipped"] = [reason.removeprefix("Skipped: ")]
    elif report.when == "call" or report.failed:
        part["tried"] = max(1, cases.number if cases else 0)
        part["failed"] = int(report.failed)
        part["skipped"] = cases.skipped if cases else []
    return part


class Table:
    """All rows of a run."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}

    def add(self, part: dict[str, Any]) -> None:
        """Count one part of a test: what :func:`outcome` gave."""
        row = self.rows.setdefault(part["row"], Row())
        row.tried += part["tried"]
        row.failed += part["failed"]
        row.seconds += part["seconds"]
        row.skipped += part["skipped"]

    @property
    def complete(self) -> bool:
        return all(number in self.rows and self.rows[number].tried for number in ROWS)

    def lines(self) -> list[str]:
        """The table for people, every row in it."""
        width = max(map(len, ROWS.values()))
        lines = [f"{'row':>3}  {'behaviour':{width}}  {'tried':>7}  {'failed':>6}  {'seconds':>7}"]
        for number, behaviour in ROWS.items():
            row = self.rows.get(number)
            if row is None:
                lines.append(f"{number:>3}  {behaviour:{width}}  not run")
                continue
            line = f"{row.tried:>7}  {row.failed:>6}  {row.seconds:>7.1f}"
            skipped = "; ".join(dict.fromkeys(row.skipped))
            note = f"  skipped: {skipped}" if skipped else ""
            lines.append(f"{number:>3}  {behaviour:{width}}  {line}{note}")
        return lines

    def records(self) -> list[dict[str, Any]]:
        """The rows that were run, for a file."""
        return [
            {"row": number, "behaviour": behaviour, "tried": row.tried, "failed": row.failed,
             "seconds": round(row.seconds, 1)}
            for number, behaviour in ROWS.items()
            if (row := self.rows.get(number)) is not None
        ]  # fmt: skip


_TABLE = pytest.StashKey[Table]()
_NOTES = pytest.StashKey[list[str]]()
CASES = pytest.StashKey[Cases]()  # of a test: what its fixture counted


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-counts",
        action="store_true",
        help="fault tests: all cases, not a tenth of them or fewer",
    )


def whole(config: pytest.Config) -> bool:
    """Whether all cases are tried."""
    return bool(config.getoption("--full-counts"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(number): which row of the faults a test is part of")
    config.stash[_TABLE] = Table()
    config.stash[_NOTES] = []
    config.pluginmanager.register(_Summary(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_row_") and item.get_closest_marker("row") is None:
            raise pytest.UsageError(f"{item.nodeid} does not say which row it is part of")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("row")
    if marker is not None:
        part = outcome(int(marker.args[0]), report, item.stash.get(CASES, None))
        report.user_properties.append(("row", part))
    return report


class _Summary:
    """Adds up what the tests report, in this process or in workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._table, self._notes = config.stash[_TABLE], config.stash[_NOTES]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "row" and isinstance(value, dict):
                self._table.add(value)
            elif name == "note" and report.when == "call":
                self._notes.append(str(value))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    table, notes = config.stash[_TABLE], config.stash[_NOTES]
    counts = "whole counts" if whole(config) else "a tenth of the counts"
    if notes:
        terminalreporter.section(f"load, {counts}")
        for line in notes:
            terminalreporter.line(line)
    if not table.rows:
        return
    terminalreporter.section(f"faults, {counts}")
    for line in table.lines():
        terminalreporter.line(line)
    if whole(config) and table.complete:
        RESULTS.write_text(json.dumps(table.records(), indent=1) + "\n")
        terminalreporter.line(f"written: {RESULTS}")
