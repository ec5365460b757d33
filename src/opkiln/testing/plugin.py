"""pytest's option ``--opkiln=native|reference|both``: the modes that tests run in.

pytest imports this module in every environment that has opkiln, for all projects. So it imports
nothing of opkiln but ``modes.py``, which has the work, and without the option it adds a marker and
a fixture and does no more.
"""

from __future__ import annotations

import pytest

from opkiln.testing.modes import ASKED, MARKER, Modes


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
