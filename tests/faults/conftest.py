"""Ops, compilers and processes to do harm to."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fault_rows import CASES, Cases, whole
from loaders import SETTLED_NS, Compiler, Loader, learn, returning
from sample import child, known

import opkiln
from opkiln import settings
from opkiln.base import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Cases:
    """How many cases to try: a tenth of the counts, or all of them with ``--full-counts``."""
    made = request.node.stash[CASES] = Cases(whole=whole(request.config))
    return made


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Keeps a line of figures for the end of the run."""
    return lambda line: record_property("note", line)


@pytest.fixture(autouse=True)
def rests_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has come to rest after 20 ms: as in the processes of loads.py, also in this one."""
    monkeypatch.setattr(digest, "_SETTLED_NS", SETTLED_NS)


@pytest.fixture(autouse=True)
def compilers_are_known(request: pytest.FixtureRequest, cache: Path) -> None:
    """The store knows this machine's compilers. Nothing is copied from the pool: most tests here
    are about what a compiler that runs does."""
    if request.node.get_closest_marker("first_use") is None:
        known.make_store(cache)


@pytest.fixture(scope="session")
def shared_bytecode() -> Iterator[Path]:
    """A directory for bytecode that other users can read, too."""
    made = Path(tempfile.mkdtemp(prefix="opkiln-bytecode-", dir="/var/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(autouse=True)
def bytecode(shared_bytecode: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many interpreters are started here: they share what the first one compiled."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(shared_bytecode))


@pytest.fixture(scope="session")
def python_of_others(shared_bytecode: Path) -> str:
    """An interpreter that every user can start. What a load imports is in the shared bytecode."""
    python = child.python_for(child.NOBODY)
    if python is None:
        pytest.skip("no interpreter that another user can start")
    environment: dict[str, str | None] = {
        "PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(shared_bytecode),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        environment["OPKILN_CACHE_DIR"] = str(known.make_store(Path(place, "cache")))
        environment["OPKILN_RUNTIME_DIR"] = f"{place}/run"
        with Loader(environment, python=python) as process:
            assert process.load("op", text=returning(1)).value == 1
    return python


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach, as no directory of pytest's is."""
    made = Path(tempfile.mkdtemp(prefix="opkiln-faults-", dir="/var/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node-local directory that builds are staged in."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setenv("OPKILN_TMPDIR", str(directory))
    return directory


@pytest.fixture
def value() -> Callable[..., int]:
    """Loads a torch-free op into this process, and calls it."""

    def load(source: Path, name: str = "op", **more: Any) -> int:
        # verbose: within an override of the settings, no receipt (see loading/receipt.py) serves.
        more = {"is_python_module": False, "abi": "none", "verbose": True, **more}
        return int(opkiln.load(name, [str(source)], **more).value())

    return load


@pytest.fixture
def processes() -> Iterator[Callable[..., list[Loader]]]:
    """Starts loader processes, and closes them when the test ends."""
    started: list[Loader] = []

    def start(count: int, env: dict[str, str] | None = None, **more: Any) -> list[Loader]:
        new = [Loader(env, **more) for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for loader in started:
        loader.close()


@pytest.fixture(scope="session")
def slow_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiler, Path]:
    """A compiler, and what a store that has built with it knows of it."""
    made = Compiler(tmp_path_factory.mktemp("compiler"))
    return made, learn(made.path)


@pytest.fixture
def use(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], None]:
    """Makes a compiler the test's. Its store gets what was learnt of it."""

    def begin(compiler: Path, learnt: Path) -> None:
        monkeypatch.setenv("CXX", str(compiler))
        shutil.copytree(learnt, cache / settings.LAYOUT / "toolchains", dirs_exist_ok=True)

    return begin


@pytest.fixture
def compiler(slow_compiler: tuple[Compiler, Path], use: Callable[[Path, Path], None]) -> Compiler:
    made, learnt = slow_compiler
    made.log.unlink(missing_ok=True)
    made.take(0)
    use(made.path, learnt)
    return made
