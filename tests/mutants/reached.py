"""Runs inside the private copy that ``drawn.py`` makes: which test reaches which line, and which
test fails.

``drawn.py`` puts this file into the copy's environment. A ``.pth`` file there calls ``start`` in
every Python of that environment while there is a directory ``reach`` in the copy, so that the
processes that a test starts are measured as well. They learn the test's name from a file, since
opkiln and the tests pass on few variables. pytest loads the file as a plugin.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import coverage
    import pytest

# The copy, four directories above .venv/lib/python3.11/site-packages. Environments that tests make
# link to this file.
PLACE = Path(__file__).resolve().parent.parent.parent.parent.parent
DATA, CURRENT = PLACE / "reach", PLACE / "reach" / "current"
CHOSEN, FAILED = PLACE / "chosen.json", PLACE / "failed"
INCLUDED = ("*/src/opkiln/*", "*/site-packages/opkiln/*")
QUIET = ["no-data-collected", "trace-changed", "couldnt-parse"]

_measuring: coverage.Coverage | None = None
_tests: dict[str, dict[str, Any]] = {}


def start() -> None:
    """Measure this process. If that fails it runs unmeasured: no test may fail because of it."""
    global _measuring
    if not DATA.is_dir():
        return
    try:
        import coverage

        found = coverage.Coverage(
            data_file=str(DATA / "coverage"), data_suffix=True, branch=True, config_file=False,
            include=INCLUDED, messages=False,
        )  # fmt: skip
        found.set_option("run:patch", ["_exit"])  # how a forked child ends
        found.set_option("run:disable_warnings", QUIET)
        found.start()
        _measuring = found
        _follow()
        atexit.register(_save)
        os.register_at_fork(after_in_child=_follow)
    except Exception:
        pass


def _follow() -> None:
    """Measure for the test that runs now. A server that forks may be older than that test."""
    assert _measuring is not None
    try:
        _measuring.switch_context(CURRENT.read_text())
    except Exception:
        pass


def _save() -> None:
    assert _measuring is not None
    try:
        _measuring.stop()
        _measuring.save()
    except Exception:
        pass


def _switch(context: str) -> None:
    if _measuring is not None:
        CURRENT.write_text(context)
        _measuring.switch_context(context)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tests. One whose name is not there any more is no error."""
    if CHOSEN.exists():
        chosen = set(json.loads(CHOSEN.read_text()))
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Measure for this test from now on, and note which shared fixtures it uses."""
    found: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    shared = [_name(each[-1]) for each in found.values() if each[-1].scope != "function"]
    _tests[item.nodeid] = {"id": item.nodeid, "seconds": 0.0, "outcome": "", "shared": shared}
    _switch(item.nodeid)


def pytest_runtest_logfinish() -> None:
    _switch("")


def pytest_configure(config: pytest.Config) -> None:
    import pytest  # not above: every Python of the copy imports this file

    class SharedFixtures:
        """What a shared fixture does counts for all tests that use it, not for the first alone."""

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
            if _measuring is None or fixturedef.scope == "function":
                return (yield)
            before = CURRENT.read_text()
            _switch(_name(fixturedef))
            try:
                return (yield)
            finally:
                _switch(before)

    config.pluginmanager.register(SharedFixtures())


def _name(fixture: Any) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    test = _tests[report.nodeid]
    test["seconds"] += report.duration
    if report.when == "call" or report.outcome != "passed":
        test["outcome"] = report.outcome
    _note_failure(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_failure(report)


def _note_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed:
        with FAILED.open("a") as file:
            file.write(f"{report.nodeid}\n")


def pytest_sessionfinish() -> None:
    if DATA.is_dir():
        (DATA / "tests.json").write_text(json.dumps(list(_tests.values())))
