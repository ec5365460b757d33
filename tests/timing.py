"""How long the files of tests take: the longest begin first, so that no worker ends long after the
others. ``pytest --keep-durations`` (``make durations``) writes down what this run took. A run ends
with how many tests were collected, run and skipped.

A plugin of tests/conftest.py, not part of it: with xdist the tests run in workers, and the process
that adds up loads no conftest below tests/.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from sample import levels

KEPT = Path(__file__).with_name("durations.json")
_NEW = 20.0  # seconds, for a file that is not listed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-durations", action="store_true", help="write what each file took to durations.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Clock(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return  # not a worker of xdist: one after the other, in the order of the command line
    kept = json.loads(KEPT.read_text())
    items.sort(key=lambda item: -kept.get(_file(item.nodeid), _NEW))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class _Clock:
    """Adds up the time of each file, and counts what was collected and run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: Counter[str] = Counter()
        self._collected = self._skipped = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = max(self._collected, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected = max(self._collected, len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_file(report.nodeid)] += report.duration
        self._skipped += report.skipped

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        run = self._collected - self._skipped
        terminalreporter.line(
            f"{self._collected} tests collected, {run} run, {self._skipped} skipped, in "
            f"{len(self._seconds)} files\n{levels.report()}"
        )
        if not self._config.getoption("--keep-durations"):
            return
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        root = self._config.rootpath
        there = {name: took for name, took in kept.items() if (root / name).exists()}
        there.update((name, round(took, 1)) for name, took in self._seconds.items())
        KEPT.write_text(json.dumps(dict(sorted(there.items())), indent=0) + "\n")
        terminalreporter.line(f"written: {KEPT}")
