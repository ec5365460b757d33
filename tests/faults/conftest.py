"""Ops, compilers and processes to do harm to."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fault_rows import CASES, Cases, whole
from loaders import Loader
from sample.package import rest

import opkiln

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
def bytecode(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many interpreters are started here: they share what the first one compiled."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    prefix = tmp_path_factory.getbasetemp() / "bytecode"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(prefix))


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


class Compiler:
    """A g++ that notes each compile and takes its time."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "compiles"
        self.delay = directory / "delay"
        self.path = directory / "g++"
        real = shutil.which("g++")
        self.path.write_text(
            "#!/bin/sh\n"
            'for each in "$@"; do\n'
            '  if [ "$each" = -c ]; then\n'
            f'    echo c >> "{self.log}"; sleep "$(cat "{self.delay}")"\n'
            "  fi\n"
            "done\n"
            f'exec {real} "$@"\n'
        )
        self.path.chmod(0o755)
        self.take(0)

    def take(self, seconds: float) -> None:
        self.delay.write_text(str(seconds))
        rest()  # the compiler reads it, so it is one of the inputs

    @property
    def compiles(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path_factory.mktemp("compiler"))
    monkeypatch.setenv("CXX", str(made.path))
    return made
