"""Fixtures for the catalogue: a test of an op runs on its native version and on its reference."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import catalogue as listed
from sample import sanitizers
from sample.references import references

from opkiln.errors import ToolchainError
from opkiln.run import events
from opkiln.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from host_oracle import Case

HOST_OPTIMIZERS = {
    "CPUAdam": "cpu_adam",
    "CPUAdagrad": "cpu_adagrad",
    "CPULion": "cpu_lion",
}


@pytest.fixture(scope="session")
def catalogue(catalogue: Path) -> Path:
    """That of the run that started this one, if any: see test_gds.py."""
    shared = os.environ.get("GDS_STAND_INS")
    return Path(shared) if shared else catalogue


@pytest.fixture(autouse=True)
def cache(cache: Path, catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the store that all tests of the catalogue share."""
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(catalogue))
    return catalogue


@pytest.fixture(scope="module", autouse=True)
def compiled(catalogue: Path) -> Iterator[list[str]]:
    """What was compiled into the shared store, and not yet complained about. Fixtures of a module
    use that store, too."""
    found: list[str] = []

    def listen(event: events.Event) -> None:
        if (
            event.kind == events.STEP_START
            and event.data["label"] not in events.NO_COMPILES
            and settings.cache_dir == str(catalogue)
        ):
            found.append(f"{event.data['label']} of {event.data['op']}")

    with pytest.MonkeyPatch.context() as patch, events.listen(listen):
        patch.setenv("OPKILN_CACHE_DIR", str(catalogue))
        yield found


@pytest.fixture(autouse=True)
def nothing_missing(compiled: list[str], whole_grid: bool) -> Iterator[None]:
    """Fails a test of `make test` that compiled what sample/catalogue.py has not built."""
    yield
    found = ", ".join(compiled)
    compiled.clear()
    if found and not whole_grid and not sanitizers.flags() and listed.is_current():
        pytest.fail(f"it compiled {found}: add that to tests/sample/catalogue.py")


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For a test that must not find what others have built: the root of a store of its own."""
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def _native(name: str) -> Any:
    """The op's functions, served by its native library; skips where there is no compiler."""
    from opkiln import get_builder

    try:
        return get_builder(name).jit_load()
    except ToolchainError as error:
        pytest.skip(f"no native {name} here: {error.what}")


def _reference(name: str) -> Any:
    """The op's functions in PyTorch."""

    return references(name)


@pytest.fixture(params=["native", "reference"])
def adam(request: pytest.FixtureRequest) -> Any:
    """``cpu_adam_`` and ``cpu_adam_rollback_``: the native ones, then the reference's."""
    return _native("cpu_adam") if request.param == "native" else _reference("cpu_adam")


@pytest.fixture
def native_adam() -> Any:
    """The native ``cpu_adam_`` and ``cpu_adam_rollback_``."""
    return _native("cpu_adam")


@pytest.fixture(params=["native", "reference"])
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the host optimizers run on: the native ops, then the references."""
    from opkiln import optim

    for optimizer, name in HOST_OPTIMIZERS.items():
        ops = _native(name) if request.param == "native" else _reference(name)
        monkeypatch.setattr(getattr(optim, optimizer), "_ops", {"cpu": ops})
    return str(request.param)


@pytest.fixture
def native_optimizer(name: str) -> None:
    """The op of the host optimizer of this name is native, or the test is skipped."""
    _native(HOST_OPTIMIZERS[name])


@pytest.fixture(params=["native", "reference"])
def ops(request: pytest.FixtureRequest, case: Case) -> Any:
    """The functions of a case's op: the native ones, then the reference's."""
    return _native(case.op) if request.param == "native" else _reference(case.op)


@pytest.fixture
def native_ops(case: Case) -> Any:
    """The native functions of a case's op."""
    return _native(case.op)


@pytest.fixture
def reference_ops(case: Case) -> Any:
    """The reference of a case's op."""
    return _reference(case.op)
