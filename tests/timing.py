"""How long the files of tests take: the longest begin first, so that no worker ends long after the
others. ``pytest --keep-durations`` (``make durations``) writes down what this run took.

A plugin of tests/conftest.py, not part of it: with xdist the tests run in workers, and the process
that adds up loads no conftest below tests/.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

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
    if not config.getoption("dist", "no").startswith("load"):
        return  # one after the other, in the order of the command line
    kept = json.loads(KEPT.read_text())
    items.sort(key=lambda item: -kept.get(_file(item.nodeid), _NEW))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class _Clock:
    """Adds up the time of each file, and counts what was collected and run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_file(report.nodeid)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._config.getoption("--keep-durations"):
            return
        kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        root = self._config.rootpath
        there = {name: took for name, took in kept.items() if (root / name).exists()}
        there.update((name, round(took, 1)) for name, took in self._seconds.items())
        KEPT.write_text(json.dumps(dict(sorted(there.items())), indent=0) + "\n")
        terminalreporter.line(f"written: {KEPT}")
