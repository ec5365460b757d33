"""A signal handler that loads an op while its own thread is loading one: no deadlock."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

import opkiln
from opkiln import process
from opkiln.errors import BuildError
from opkiln.guard import once_per_thread
from opkiln.toolchain import host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def load(source: Path, name: str) -> Any:
    return opkiln.load(name, [str(source)], is_python_module=False, abi="none", verbose=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "op.cpp"
    path.write_text('static int count; extern "C" int bump() { return ++count; }\n')
    return path


def interrupted(source: Path, handler: Callable[[], Any]) -> list[Any]:
    """Build an op, and have a signal handler run whenever this thread starts a program meanwhile.

    Gives what the handler got.
    """
    got: list[Any] = []

    def on_signal(*_: object) -> None:
        try:
            got.append(handler())
        except BuildError as error:
            got.append(error)

    def started(_argv: Sequence[str]) -> None:
        if threading.current_thread() is threading.main_thread() and not got:
            signal.raise_signal(signal.SIGUSR1)

    def hangs(*_: object) -> None:
        raise AssertionError("the handler waits for its own thread")

    before = signal.signal(signal.SIGUSR1, on_signal)
    alarm = signal.signal(signal.SIGALRM, hangs)  # a wait for a lock ends with what this raises
    signal.alarm(100)
    try:
        with process.telling(started):
            assert load(source, "outer").bump() > 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGUSR1, before)
    return got


@pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")
@pytest.mark.parametrize("name", ["outer", "inner"])
def test_a_handler_that_would_have_to_build_gets_a_clear_error(name: str, source: Path) -> None:
    load(source, "warm")  # imports are done, and the compilers are known
    (error,) = interrupted(source, lambda: load(source, name))
    assert isinstance(error, BuildError)
    assert "while the same thread" in error.what
    assert load(source, name).bump() > 0


@pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")
def test_a_handler_gets_what_is_in_the_cache(source: Path) -> None:
    load(source, "warm")
    (found,) = interrupted(source, lambda: load(source, "warm"))
    assert found.bump() > 0


def test_another_thread_may_enter_at_the_same_time() -> None:
    entered: list[str] = []

    def enter() -> None:
        with once_per_thread("waits"):
            entered.append("there")

    with once_per_thread("waits"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        with pytest.raises(BuildError, match="while the same thread waits"):
            enter()
    enter()
    assert entered == ["there", "there"]
