"""Every test gets a cache, a budget and an environment of its own."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import zlib
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from sample import child, forks, known, pool, sanitizers
from sample.package import Package, Steps

from opkiln.decision import terms as seal
from opkiln.run import events

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

pytest_plugins = ["fault_rows", "timing"]

# A property test draws the same few examples in every run of `make test`, so that a change is
# judged by itself. `make test-full` draws as many as hypothesis does; `make test-random` new ones,
# with their seed. How long drawing takes says how busy the machine is, and nothing of the test.
_PROFILES: dict[str, dict[str, Any]] = {
    "fixed": {"derandomize": True, "max_examples": 30},
    "full": {"derandomize": True},
    "random": {"derandomize": False, "print_blob": True},
}
for _name, _given in _PROFILES.items():
    hypothesis.settings.register_profile(
        _name, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], **_given
    )
hypothesis.settings.load_profile("fixed")

# Read by OpenMP when torch is imported. By default its threads spin while they wait for work, which
# takes half of the CPU time of tests/ops from the workers beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def every_case(config: pytest.Config) -> bool:
    """Whether this is a run of everything, and not `make test`."""
    return "not full" not in config.getoption("-m")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sanitize", action="store_true", help="compile for the CPU with ASan and UBSan"
    )


def pytest_configure(config: pytest.Config) -> None:
    pool.make()
    forks.leave_writing_to_the_kernel()
    if every_case(config) and not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("full")
    if config.getoption("--sanitize"):
        sanitizers.switch_on()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The collector of garbage has nothing to find while modules are imported, and then need not
    look at torch, the tests and what they import again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def private_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of directories, one for each test: pytest's own take a millisecond each."""
    base = tmp_path_factory.mktemp("private")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def cache(private_directories: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the private store; nothing that the user has set reaches a test."""
    for name in (child.VARIABLES - {"XDG_CACHE_HOME"}).intersection(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.delenv("MAKEFLAGS", raising=False)  # `make test` sets it, if it is given options
    private = next(private_directories)
    private.mkdir(0o700)
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(private / "cache"))
    monkeypatch.setenv("OPKILN_RUNTIME_DIR", str(private / "run"))
    # Python would write beside what a test looks at, and when depends on what ran before.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name, value in sanitizers.variables().items():
        monkeypatch.setenv(name, value)
    return private / "cache"


@pytest.fixture(scope="session")
def catalogue() -> Path:
    """The root of a store that all tests share, also those of other runs, for ops of the catalogue:
    one takes seconds to compile. Nobody takes anything out of it."""
    return pool.CATALOGUE


@pytest.fixture(scope="session")
def whole_grid(request: pytest.FixtureRequest) -> bool:
    """Whether every dtype has every shape, and not one of them all and the others some."""
    return every_case(request.config)


@pytest.fixture
def asked_once(
    cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The root of a store that tests of what commands say share: it knows the compilers."""
    shared = tmp_path_factory.getbasetemp() / "asked once"
    if not shared.exists():
        known.make_store(shared)
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(shared))
    return shared


@pytest.fixture
def warm(
    request: pytest.FixtureRequest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The test's store knows this machine's compilers, and what was compiled before is copied from
    the pool. For tests that build, unless they ask what the first build on a machine does or look
    at all that a store holds (``first_use`` marks them), or count compiles."""
    if request.node.get_closest_marker("first_use") is not None:
        yield
        return
    known.make_store(cache)
    counts = "steps" in request.fixturenames or request.node.get_closest_marker("counts_compiles")
    if not counts:
        monkeypatch.setenv("OPKILN_STORE_LAYERS", str(pool.LAYER))
    yield
    if not counts:
        pool.add(cache)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """torch.compile remembers by code what it compiled and what it gave up; a test starts anew."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture
def package(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Package]:
    """Makes a copy of a sample package that can be imported: ``package("plain")``. Its name is no
    other test's, and the same in every run: some sources are compiled with it."""
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    numbers = itertools.count(1)
    test = zlib.crc32(request.node.nodeid.encode())

    def make(kind: str, form: str = "") -> Package:
        return Package(kind, tmp_path / "packages", f"{kind}_{test:08x}_{next(numbers)}", form)

    return make


@pytest.fixture
def plain(package: Callable[..., Package]) -> Package:
    """A torch-free op with several sources and headers."""
    return package("plain")


@pytest.fixture
def steps() -> Iterator[Steps]:
    """The steps that this process's builds run during the test."""
    seen = Steps()
    with events.listen(seen):
        yield seen


@pytest.fixture
def unsealed() -> Iterator[None]:
    """Lifts the seal after a test that sets it."""
    yield
    seal.seal("off")
