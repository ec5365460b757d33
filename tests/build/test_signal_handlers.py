"""A signal handler that loads an op while its own thread is loading one: no deadlock."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import opkiln
from opkiln.base import trust
from opkiln.errors import BuildError
from opkiln.machine.toolchain import host
from opkiln.run import budget, events, process
from opkiln.run.process import once_per_thread
from opkiln.settings import override
from opkiln.store import lock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType


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
        with process.watch_starts(started):
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


# The modules that hold locks while a thread builds, or asks the compilers.
LOCKING = (
    "run/process.py", "store/lock.py", "run/progress.py", "run/budget.py", "base/trust.py",
    "run/chrome.py",
)  # fmt: skip


@pytest.mark.timed
@pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")
def test_a_handler_between_any_two_lines_never_waits_for_its_own_thread(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: set[tuple[str, int]] = set()
    hung: list[tuple[str, int]] = []
    said: Counter[str] = Counter()

    def on_signal(*_: object) -> None:
        """Take every lock that a build takes."""
        events.emit(events.NOTE, text="from a handler")
        budget.shared_budget()
        with trust.usable_by_owner():
            pass
        try:
            with lock.turn(
                str(tmp_path), "other", lambda: None, lambda _: None, what="it", limit=30.0
            ):
                process.run(["true"])
                said["ran"] += 1
        except BuildError as error:
            said[error.what] += 1

    def hangs(*_: object) -> None:
        raise TimeoutError

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        path = frame.f_code.co_filename
        if "/opkiln/" not in path:
            return None
        where = (path, frame.f_lineno)
        if event == "line" and path.endswith(LOCKING) and where not in seen:
            seen.add(where)
            signal.alarm(30)
            try:
                signal.raise_signal(signal.SIGUSR1)
            except TimeoutError:
                hung.append(where)
            finally:
                signal.alarm(0)
        return trace

    process.run(["true"])  # the handler's part is imported
    before = signal.signal(signal.SIGUSR1, on_signal)
    alarm = signal.signal(signal.SIGALRM, hangs)
    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        with override(progress="lines", trace=str(tmp_path / "trace.json")):
            assert load_aloud(source, "traced").bump() > 0
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGALRM, alarm)
        signal.signal(signal.SIGUSR1, before)
    assert hung == []
    assert {Path(path).name for path, _ in seen} == {Path(name).name for name in LOCKING}
    assert said["ran"] > 10
    assert said["an op cannot be loaded while the same thread talks to its watchdog"] > 0
    assert "built traced" in capsys.readouterr().err


def load_aloud(source: Path, name: str) -> Any:
    return opkiln.load(name, [str(source)], is_python_module=False, abi="none", verbose=True)


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
