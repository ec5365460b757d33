"""pytest's option ``--opkiln=native|reference|both``: the modes that tests run in.

A mode is a value of ``OPKILN_MODE``, set while a test runs. Threads and processes that the test
starts see it, too. The variable alone is not enough, because a process keeps what it has loaded: a
kernel that is registered with torch serves every later call. ``run_in_mode`` also makes this
process forget the references that serve ops, and sets the kernels aside for a test that runs
references.

pytest imports this module in every environment that has opkiln, for all projects. So it imports
nothing of opkiln, and without the option it adds a marker and a fixture and does no more.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager

import pytest

NATIVE, REFERENCE = MODES = ("native", "reference")
# The values of the option.
ASKED = {NATIVE: (NATIVE,), REFERENCE: (REFERENCE,), "both": MODES}
MARKER = "opkiln"
_FIXTURE = "opkiln_mode"
_VARIABLE = "OPKILN_MODE"


class Modes:
    """The hooks of a run with ``--opkiln``."""

    def __init__(self, asked: tuple[str, ...]) -> None:
        self._asked = asked
        self._variables = pytest.MonkeyPatch()

    def pytest_sessionstart(self) -> None:
        # Test modules may load ops when they are imported. With both modes that is left as it is.
        if len(self._asked) == 1:
            self._variables.setenv(_VARIABLE, self._asked[0])

    def pytest_unconfigure(self) -> None:
        self._variables.undo()

    def pytest_report_header(self) -> str:
        return f"opkiln: {' and '.join(self._asked)}"

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make two tests of each test. The mode is a parameter of the session, so the tests of one
        mode run together, and fixtures of any scope can depend on it."""
        if len(self._asked) == 1:
            return
        modes = self._modes(metafunc.definition)
        if _FIXTURE not in metafunc.fixturenames:
            metafunc.fixturenames.append(_FIXTURE)
        metafunc.parametrize(_FIXTURE, modes, indirect=True, scope="session")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not self._modes(item):
            pytest.skip(f"it is marked {MARKER}({_marked_mode(item)!r}), and this run is not")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        mode = self._mode(item)
        if mode is None:
            return (yield)
        with run_in_mode(mode):
            return (yield)

    def _modes(self, item: pytest.Item) -> tuple[str, ...]:
        """The modes that a test is to run in."""
        only = _marked_mode(item)
        return self._asked if only is None else tuple(each for each in self._asked if each == only)

    def _mode(self, item: pytest.Item) -> str | None:
        """The mode of one run of a test; None for a test that is not for this run."""
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        # pytest cannot give parameters to some tests, such as a unittest.TestCase: these run once.
        return parameters.get(_FIXTURE) or next(iter(self._modes(item)), None)


def _marked_mode(item: pytest.Item) -> str | None:
    """The mode that a test is marked with. Raises pytest.UsageError for an unknown one."""
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        return None
    given = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else None
    if given not in MODES:
        raise pytest.UsageError(
            f"{item.nodeid}: @pytest.mark.{MARKER} takes one of {', '.join(MODES)}"
        )
    return str(given)


@contextmanager
def run_in_mode(mode: str) -> Iterator[None]:
    """Within the block, this process and those that it starts run ops in this mode.

    What was loaded before makes no difference, and nothing that is loaded in the block with
    ``reference`` serves after it.
    """
    with pytest.MonkeyPatch.context() as variables, ExitStack() as stack:
        variables.setenv(_VARIABLE, mode)
        loader = sys.modules.get("opkiln.loading.loader")
        if loader is not None:  # else nobody has loaded anything
            loader.forget_references()
            if mode == REFERENCE:
                stack.enter_context(loader.set_aside())
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("opkiln").addoption(
        "--opkiln",
        choices=tuple(ASKED),
        help="run the tests with opkiln's ops native (a test whose op falls back to its reference "
        "fails), with their references (nothing is compiled), or each test in both ways",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARKER}(mode): run in this mode of --opkiln only: native or reference"
    )
    asked = config.getoption("--opkiln")
    if asked is not None:
        config.pluginmanager.register(Modes(ASKED[asked]), "opkiln-modes")


@pytest.fixture(scope="session")
def opkiln_mode(request: pytest.FixtureRequest) -> str:
    """The mode that the test runs in: ``native`` or ``reference``. Without ``--opkiln``, the value
    of ``OPKILN_MODE``, which is ``auto`` by default."""
    given: str | None = getattr(request, "param", None)
    if given is None:
        from opkiln.settings import settings

        given = str(settings.mode)
    return given
