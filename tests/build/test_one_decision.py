"""Everybody who says what serves an op says the same, in any environment.

An environment is drawn: the compilers, the CPU and the GPUs, the settings, the seal, what the store
has and what the package carries. What is asked is what users ask: a load, ``explain``, ``check``,
``report``, ``is_compatible`` and a build. There is no GPU here, so the driver's answer is put in
its place, and a CUDA op is looked at without being compiled.
"""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from fault_rows import whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample import known
from sample.levels import LEVELS

from opkiln.builder import CUDAOpBuilder, OpBuilder
from opkiln.builder.base import DeclaredFunctions
from opkiln.decision import terms
from opkiln.decision.terms import (
    BUILD,
    CACHED,
    WOULD_COMPILE,
    WOULD_FAIL,
    WOULD_FALL_BACK,
    Build,
    Request,
    Serve,
    summary,
)
from opkiln.errors import OpkilnError
from opkiln.loading import loader
from opkiln.loading.explain import explain
from opkiln.loading.loader import look
from opkiln.machine import uname
from opkiln.machine.devices import nvidia
from opkiln.report import operators
from opkiln.settings import override
from opkiln.ship import prebuild
from opkiln.store import layer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = 'extern "C" int decided() { return %d; }\n'


class World(NamedTuple):
    """An environment, in the words of the draws below."""

    mode: str
    seal: str
    compiler: str
    cpu: str  # what is asked for
    masked: bool  # whether the CPU lacks what its highest level has
    store: str
    carried: str
    reference: bool
    gpus: tuple[str, ...] | None  # None: an op for the CPU

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())


WORLDS = st.builds(
    World,
    mode=st.sampled_from(
        ["auto", "native", "cached", "sealed", "needed", "source", "reference", "check"]
    ),
    seal=st.sampled_from(["off", "off", "off", "error"]),
    compiler=st.sampled_from(["g++", "g++", "none", "broken"]),
    cpu=st.sampled_from(["native", "native", LEVELS[1], LEVELS[max(LEVELS)]]),
    masked=st.booleans(),
    store=st.sampled_from(["empty", "built", "damaged", "edited"]),
    carried=st.sampled_from(["nothing", "nothing", "good", "damaged", "foreign"]),
    reference=st.booleans(),
    gpus=st.sampled_from([None, None, None, (), ("9.0",), ("7.5", "8.0")]),
)


class Place:
    """A package with one op, a store that has it, and a layer as a package would carry it."""

    def __init__(self, where: Path) -> None:
        self.root = where / "package"
        self.root.mkdir(parents=True)
        self.source = self.root / "decided.cpp"
        self.source.write_text(SOURCE % 1)
        os.utime(self.source, (1, 1))
        self.store = known.make_store(where / "store")
        with override(cache_dir=str(self.store)):
            found, _ = loader.obtain(Request(self.kind(World(*[None] * 9))().op(), BUILD))  # type: ignore[arg-type]
        layer.export([found.path], str(where / "carried"))
        self.carried = where / "carried"

    def kind(self, world: World) -> type[OpBuilder]:
        """The op's builder class."""
        root = str(self.root)

        class Decided(CUDAOpBuilder if world.gpus is not None else OpBuilder):  # type: ignore[misc]
            NAME = "decided"
            DISTRIBUTION = "decided_ops"
            KIND, ABI = "plain", "none"
            BACKENDS = ("cuda",) if world.gpus is not None else ("cpu",)

            def sources(self) -> list[str]:
                return ["decided.cpp"]

        if world.reference:
            declared = SimpleNamespace(name="decided", schema="decided() -> int")
            Decided.FUNCTIONS = DeclaredFunctions()
            Decided.declare(declared)
        Decided.root = root  # type: ignore[assignment]
        return Decided


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("decided"))


def enter(world: World, place: Place, here: Path, stack: ExitStack) -> type[OpBuilder]:
    """Make this process see an environment until the stack ends."""
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    root = here / "package"
    shutil.copytree(place.root, root)
    store = here / "store"
    if world.store == "empty":
        known.make_store(store)
    else:
        shutil.copytree(place.store, store)
    if world.store == "damaged":
        for library in store.rglob("*.so"):
            library.chmod(0o600)
            library.write_bytes(b"no library")
    if world.store == "edited":
        (root / "decided.cpp").write_text(SOURCE % 2)
    if world.carried != "nothing":
        shutil.copytree(place.carried, root / "prebuilt")
        for library in (root / "prebuilt").rglob("*.so"):
            if world.carried == "damaged":
                library.write_bytes(b"no library")
    if world.masked or world.carried == "foreign":
        flags = uname.cpu_flags()
        patch.setattr(
            uname, "cpu_flags", lambda: " ".join(flags.split()[: 4 if world.masked else None])
        )
    tools = here / "bin"
    tools.mkdir()
    if world.compiler == "broken":
        for name in ("g++", "clang++", "c++"):
            (tools / name).write_text("#!/bin/sh\nexit 1\n")
            (tools / name).chmod(0o755)
    patch.setenv("PATH", os.environ["PATH"] if world.compiler == "g++" else str(tools))
    patch.setenv("OPKILN_CACHE_DIR", str(store))
    patch.setenv("OPKILN_MODE", world.mode)
    patch.setenv("OPKILN_CPU", world.cpu)
    gpus = tuple(
        nvidia.NvidiaGPU(index, f"GPU-{index}", "stand-in", capability, 1 << 30)
        for index, capability in enumerate(world.gpus or ())
    )
    patch.setitem(nvidia._known, "/", nvidia.NvidiaDevices(gpus, "580", "13.0", "nvml"))
    patch.setattr(terms, "_seal", world.seal)
    patch.setattr(loader.here, "ops", {})
    kind = place.kind(world)
    kind.root = str(root)  # type: ignore[assignment]
    return kind


def answers(kind: type[OpBuilder]) -> dict[str, str]:
    """What each of those who only look says, as one of the four words."""
    said = summary(look(Request(kind().op()))).status
    explained = explain(kind().op()).verdict.partition(":")[0]
    (reported,) = {operators.backend_status(kind, kind().backend).status}
    return {"decide": said, "explain": explained, "report": reported}


def check(world: World, kind: type[OpBuilder]) -> str:
    """Ask everybody. Raises AssertionError where two disagree."""
    said = answers(kind)
    assert len(set(said.values())) == 1, said
    (status,) = set(said.values())
    native = look(Request(kind().op(), must_be_native=True))
    builder = kind()
    assert builder.is_compatible() == isinstance(native, (Serve, Build)), (
        native,
        builder.error_log,
    )
    if status in (CACHED, WOULD_COMPILE):
        assert builder.is_compatible()
    if world.gpus is None:
        assert loaded(kind) == status
        if not builder.is_compatible():
            with pytest.raises(OpkilnError):
                kind().jit_load()
        (built,) = prebuild.prebuild([prebuild.BuildRequest(kind())])
        assert (built.status in (prebuild.BUILT, prebuild.CACHED)) or not builder.is_compatible()
    return status


def loaded(kind: type[OpBuilder]) -> str:
    """What a load really comes to."""
    try:
        found = loader.load(kind().op())
    except OpkilnError:
        return WOULD_FAIL
    if found.artifact is None:
        return WOULD_FALL_BACK
    return WOULD_COMPILE if found.artifact.origin == "built" else CACHED


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), override(progress="off"):
        warnings.simplefilter("ignore")
        yield


def test_everybody_says_the_same_of_what_serves(
    place: Place, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    count = 150 if whole(request.config) else 30

    @given(world=WORLDS)
    @settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def agree(world: World) -> None:
        with ExitStack() as stack:
            check(world, enter(world, place, tmp_path_factory.mktemp("world"), stack))

    agree()


def test_a_disagreement_is_found(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("cached", "off", "g++", "native", False, "empty", "nothing", True, None)
    with ExitStack() as stack:
        kind = (
            enter(world, place, tmp_path / "agreed", stack)
            if (tmp_path / "agreed").mkdir() is None
            else None
        )
        assert kind is not None
        assert check(world, kind) == WOULD_FALL_BACK

    def always(self: Any, verbose: bool = False) -> bool:
        return True

    with ExitStack() as stack:
        (tmp_path / "planted").mkdir()
        kind = enter(world, place, tmp_path / "planted", stack)
        monkeypatch.setattr(kind, "is_compatible", always)
        with pytest.raises(AssertionError):
            check(world, kind)


def test_every_outcome_is_drawn(place: Place, tmp_path: Path) -> None:
    """The draws reach all four outcomes, for ops of the CPU and of GPUs."""
    plain = World("auto", "off", "g++", "native", False, "empty", "nothing", False, None)
    worlds = {
        CACHED: plain._replace(store="built"),
        WOULD_COMPILE: plain,
        WOULD_FALL_BACK: plain._replace(compiler="broken", reference=True),
        WOULD_FAIL: plain._replace(gpus=()),
    }
    for number, (status, world) in enumerate(worlds.items()):
        (tmp_path / str(number)).mkdir()
        with ExitStack() as stack:
            assert check(world, enter(world, place, tmp_path / str(number), stack)) == status
