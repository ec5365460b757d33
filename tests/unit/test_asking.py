"""Asking the compilers: one process does, for all. What is known of compilers is put in their
place."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sample.decisions import GCC, Compilers, World

from opkiln.building.asking import ask
from opkiln.errors import BuildError, StoreError, ToolchainError
from opkiln.machine import uname
from opkiln.machine.toolchain import choice
from opkiln.run import events
from opkiln.settings import LAYOUT, settings
from opkiln.store import lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opkiln.base.build_model import Toolchain
    from opkiln.decision.terms import Request

HERE = uname.architecture()


@pytest.fixture
def world(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, unsealed: None) -> World:
    return World(tmp_path, cache, monkeypatch)


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    return Compilers(monkeypatch)


def answer(request: Request) -> Toolchain | ToolchainError | None:
    ask(request)
    return request.compilers


def test_store_that_cannot_be_written_has_its_compilers_asked_without_a_lock(
    world: World, compilers: Compilers
) -> None:
    compilers.found, compilers.answer = True, GCC
    request = world.request()
    store = request.store
    store.location = store.location._replace(writable=None)
    assert answer(request) == GCC
    assert compilers.asked == [(store.memory, "cpu", HERE)]


def test_compilers_that_another_process_has_asked_meanwhile_are_not_asked_again(
    world: World, compilers: Compilers
) -> None:
    compilers.remembered = GCC
    request = world.request()
    assert answer(request) == GCC
    assert compilers.asked == []
    assert compilers.recalled == [(request.store.memory, "cpu", HERE)]


class Queue:
    """Another process that asks the compilers, in the place of ``lock.turn``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[lock.Waiting] = []
        self.given: dict[str, Any] = {}
        self._turn = lock.turn
        monkeypatch.setattr(lock, "turn", self.turn)

    @contextmanager
    def turn(self, root: str, name: str, arrived: Any, waiting: Any, **given: Any) -> Iterator[Any]:
        self.given = given
        for state in self.states:
            waiting(state)
        with self._turn(root, name, arrived, waiting, **given) as got:
            yield got


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


def test_who_waits_for_the_list_of_compilers_says_for_whom(
    world: World, compilers: Compilers, queue: Queue
) -> None:
    compilers.answer = GCC
    queue.states = [
        lock.Waiting(None, 1.0), lock.Waiting(lock.Holder(7, "node", "t"), 2.0, stopped=True),
    ]  # fmt: skip
    heard: list[dict[str, Any]] = []
    request = world.request()
    since = request.since = request.since - 3
    with events.listen(lambda event: heard.append(dict(event.data))):
        assert answer(request) == GCC
    listed = "the list of compilers"
    assert heard == [
        {"op": "op", "pid": 0, "host": "", "seconds": 1.0, "what": listed},
        {"op": "op", "pid": 7, "host": "node", "seconds": 2.0,
         "what": f"{listed}, but it is stopped"},
    ]  # fmt: skip
    assert compilers.asked == [(request.store.memory, "cpu", HERE)]
    assert queue.given == {
        "what": f"{listed} for cpu", "limit": settings.build_timeout, "since": since,
    }  # fmt: skip
    assert request.since > since + 3, "the time of a build counts from here"


def test_failure_to_find_compilers_is_told_to_those_who_wait_by_who_asked_first(
    world: World, compilers: Compilers, queue: Queue
) -> None:
    told = world.cache / LAYOUT / "failures" / f"compilers-cpu-{HERE}.json"
    queue.states = [lock.Waiting(None, 1.0)]
    assert isinstance(answer(world.request()), ToolchainError)
    assert not told.exists(), "who has waited asks for itself"
    queue.states = []
    assert isinstance(answer(world.request()), ToolchainError)
    assert json.loads(told.read_text())["what"] == "none"


def test_compilers_are_not_asked_by_a_signal_handler_that_interrupted_the_asking(
    world: World, compilers: Compilers
) -> None:
    inner = world.request()

    def interrupted(*_: object) -> Toolchain:
        ask(inner)
        return GCC

    world.patch.setattr(choice, "choose", interrupted)
    assert answer(world.request()) == GCC
    assert isinstance(inner.build_error, BuildError)
    assert "while the same thread asks the compilers" in str(inner.build_error)


def test_compilers_are_asked_without_a_trace_and_not_in_a_store_of_others(
    world: World, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.answer = GCC
    monkeypatch.setenv("OPKILN_TRACE", str(world.base / "trace.json"))
    request = world.request()
    assert answer(request) == GCC
    assert not (world.base / "trace.json").exists()
    (world.cache / LAYOUT).chmod(0o777)
    ask(request)
    assert isinstance(request.build_error, StoreError)
    assert "is writable by others" in str(request.build_error)
