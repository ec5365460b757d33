"""Taking turns to build: one at a time, nobody waits for the dead, everybody hears of a failure."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from sample.child import SOURCE

from opkiln.errors import BuildTimeout, CompileError
from opkiln.store import lock
from opkiln.store.lock import Turn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timed

HOLDER = """
import sys
from opkiln.errors import BuildTimeout, CompileError
from opkiln.store import lock
with lock.turn(sys.argv[1], "op", lambda: None, print, what="op", limit=60.0) as turn:
    print("mine", flush=True)
    for line in sys.stdin:
        if line == "fail\\n":
            turn.fail(CompileError("op: a.cpp does not compile", why="a.cpp:1: error",
                                   hint="mend it"))
            break
        if line == "time out\\n":
            turn.fail(BuildTimeout("g++ did not end within 6 s"), 6.0)
        if line == "advance\\n":
            turn.advance()
        print("done", flush=True)
"""


turn = functools.partial(lock.turn, what="op", limit=60.0)


@contextmanager
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process whose turn it is, until it reads a line."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "mine\n"
        try:
            yield child
        finally:
            child.kill()


def never() -> None:
    return None


def ignore(state: lock.Waiting) -> None:
    pass


def test_a_free_turn_is_ours_at_once_and_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with turn(str(tmp_path), "op", never, ignore) as got:
            assert isinstance(got, Turn)


def test_what_arrived_meanwhile_is_taken_instead_of_a_turn(tmp_path: Path) -> None:
    with turn(str(tmp_path), "op", lambda: "built", ignore) as got:
        assert got == "built"


def test_who_waits_is_told_for_whom(tmp_path: Path) -> None:
    seen: list[lock.Waiting] = []
    with holder(tmp_path) as child:

        def waiting(state: lock.Waiting) -> None:
            seen.append(state)
            if state.holder is not None and child.poll() is None:
                child.kill()

        with turn(str(tmp_path), "op", never, waiting) as got:
            assert isinstance(got, Turn)
    told = [state.holder for state in seen if state.holder is not None]
    assert (told[0].pid, told[0].host) == (child.pid, os.uname().nodename)


def test_what_arrives_while_another_builds_is_taken_without_waiting_for_its_end(
    tmp_path: Path,
) -> None:
    looks: list[int] = []

    def arrived() -> str | None:
        looks.append(1)
        return "built" if len(looks) > 3 else None

    with holder(tmp_path) as child:
        with turn(str(tmp_path), "op", arrived, ignore) as got:
            assert got == "built"
        assert child.poll() is None


def test_a_killed_holder_does_not_block_the_next_one(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        os.kill(child.pid, signal.SIGKILL)
        with turn(str(tmp_path), "op", never, ignore) as got:
            assert isinstance(got, Turn)


def test_a_failure_reaches_those_who_waited_for_it_word_for_word(tmp_path: Path) -> None:
    with holder(tmp_path) as child:

        def waiting(state: lock.Waiting) -> None:
            if state.holder is not None:
                assert child.stdin is not None
                child.stdin.write("fail\n")
                child.stdin.close()
                child.wait()

        with (
            pytest.raises(CompileError) as caught,
            turn(str(tmp_path), "op", never, waiting),
        ):
            pytest.fail("it was not our turn")
    assert str(caught.value) == "op: a.cpp does not compile\n  a.cpp:1: error\nhint: mend it"


def test_who_comes_after_a_failure_tries_anew(tmp_path: Path) -> None:
    with turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)
        got.fail(CompileError("it did not compile"))
    with turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)


def test_threads_of_one_process_take_turns_too(tmp_path: Path) -> None:
    inside, most, built = 0, 0, []
    guard = threading.Lock()

    def arrived() -> str | None:
        return "built" if built else None

    def build() -> None:
        nonlocal inside, most
        with turn(str(tmp_path), "op", arrived, ignore) as got:
            if isinstance(got, Turn):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.02)
                built.append(1)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (most, len(built)) == (1, 1)


def test_a_forked_child_does_not_inherit_a_turn_nor_wait_for_a_thread_it_lacks(
    tmp_path: Path,
) -> None:
    with turn(str(tmp_path), "op", never, ignore):
        pid = os.fork()
        if pid == 0:
            # Another op: its thread lock is free, and this one's holder is the parent.
            with turn(str(tmp_path), "other", never, ignore) as got:
                os._exit(0 if isinstance(got, Turn) else 1)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_costs_a_compile_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)


def test_a_root_that_cannot_be_written_means_nobody_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with turn(str(tmp_path / "file"), "op", never, ignore) as got:
        assert isinstance(got, Turn)
        got.fail(CompileError("this cannot be kept, which is fine"))


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "op").symlink_to(victim)
    with turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)
    assert victim.read_text() == "precious"


def tell(child: subprocess.Popen[str], what: str) -> None:
    """Have the holder do something, and wait until it is done."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{what}\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"


def test_a_wait_ends_at_its_own_limit_and_says_who_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_GRACE", 0.0)
    with (
        holder(tmp_path) as child,
        pytest.raises(BuildTimeout) as caught,
        turn(str(tmp_path), "op", never, ignore, what="op adam", limit=0.3),
    ):
        pytest.fail("it was not our turn")
    who = f"pid {child.pid} on host {os.uname().nodename}"
    assert caught.value.what == f"gave up waiting for {who}, which builds op adam"
    assert "finished no step in the last 0.3 s" in caught.value.why
    assert str(child.pid) in caught.value.hint


class Clock:
    """Stands in for the module ``time`` where a wait counts its seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(lock, "time", made)
    monkeypatch.setattr(lock, "_GRACE", 0.0)
    return made


def test_a_builder_that_finishes_steps_is_waited_for_beyond_the_limit(
    tmp_path: Path, clock: Clock
) -> None:
    with holder(tmp_path) as child:

        def waiting(state: lock.Waiting) -> None:
            clock.now += 0.5
            if clock.now > 4.5:
                child.kill()
            else:
                tell(child, "advance")

        with turn(str(tmp_path), "op", never, waiting, limit=3.0) as got:
            assert isinstance(got, Turn)
    assert clock.now > 4.5


def test_a_wait_counts_from_the_start_of_the_load_that_waits(tmp_path: Path) -> None:
    before = time.monotonic() - 100
    with (
        holder(tmp_path),
        pytest.raises(BuildTimeout),
        turn(str(tmp_path), "op", never, ignore, limit=60.0, since=before),
    ):
        pytest.fail("it was not our turn")
    assert time.monotonic() - before < 160


def test_a_new_builder_does_not_restart_the_limit(tmp_path: Path, clock: Clock) -> None:
    with holder(tmp_path) as first, holder_behind(tmp_path, first.pid) as second:

        def waiting(state: lock.Waiting) -> None:
            clock.now += 0.5
            if clock.now > 2 and first.poll() is None:
                first.kill()
                first.wait()
                assert second.stdout is not None
                assert "mine\n" in second.stdout

        with (
            pytest.raises(BuildTimeout, match=f"gave up waiting for pid {second.pid} "),
            turn(str(tmp_path), "op", never, waiting, limit=4.0, since=0.0),
        ):
            pytest.fail("it was not our turn")
    assert clock.now < 6


def test_the_time_of_a_turn_counts_from_the_load_unless_another_process_was_waited_for(
    tmp_path: Path,
) -> None:
    before = time.monotonic() - 5
    with turn(str(tmp_path), "op", never, ignore, since=before) as got:
        assert isinstance(got, Turn)
        assert got.since == before
    with holder(tmp_path) as child:

        def waiting(state: lock.Waiting) -> None:
            child.kill()

        with turn(str(tmp_path), "op", never, waiting, since=before) as got:
            assert isinstance(got, Turn)
            assert got.since > before + 5


def test_a_time_out_is_told_to_those_who_are_no_more_patient(tmp_path: Path) -> None:
    with holder(tmp_path) as child:

        def waiting(state: lock.Waiting) -> None:
            if state.holder is not None:
                tell(child, "time out")

        with (
            pytest.raises(BuildTimeout, match=r"g\+\+ did not end within 6 s"),
            turn(str(tmp_path), "op", never, waiting, limit=6.0),
        ):
            pytest.fail("it was not our turn")
        assert child.poll() is None, "the error is told before the builder has cleaned up"


def test_a_time_out_of_a_less_patient_process_is_not_taken_over(tmp_path: Path) -> None:
    with holder(tmp_path) as child:

        def waiting(state: lock.Waiting) -> None:
            if state.holder is not None:
                tell(child, "time out")
                child.kill()
                child.wait()

        with turn(str(tmp_path), "op", never, waiting, limit=7.0) as got:
            assert isinstance(got, Turn)


def test_threads_that_wait_for_a_failing_thread_get_its_error(tmp_path: Path) -> None:
    ours, told = threading.Event(), threading.Barrier(4)
    seen: list[BaseException | Turn | None] = []
    once = threading.local()

    def waiting(state: lock.Waiting) -> None:
        if not hasattr(once, "told"):
            once.told = told.wait(30)

    def wait() -> None:
        ours.wait()
        try:
            with turn(str(tmp_path), "op", never, waiting) as got:
                seen.append(got)
        except CompileError as error:
            seen.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for each in threads:
        each.start()
    with turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)
        ours.set()
        told.wait(30)
        got.fail(CompileError("it does not compile"))
    for each in threads:
        each.join(30)
    assert [str(each) for each in seen] == ["it does not compile"] * 3


def test_a_stopped_builder_is_said_to_be_stopped_and_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_PASSED_AFTER", 0.3)
    seen: list[bool] = []
    with holder(tmp_path) as child:
        os.kill(child.pid, signal.SIGSTOP)
        with turn(str(tmp_path), "op", never, lambda state: seen.append(state.stopped)) as got:
            assert isinstance(got, Turn)
            assert any(seen)
            # Others take turns with us, at the second lock.
            with holder_behind(tmp_path) as other:
                assert other.poll() is None
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdin is not None
        child.stdin.write("fail\n")
        child.stdin.close()
        assert child.wait(30) == 0


@contextmanager
def holder_behind(root: Path, holder: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Another process that waits for this one, or for the holder with this pid."""
    code = HOLDER.replace("print,", "lambda state: print(state.holder.pid, flush=True),")
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code.replace(
            "with lock", "lock._PASSED_AFTER = 0.1\nwith lock"), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        for line in child.stdout:
            if line == f"{holder or os.getpid()}\n":
                break
        else:
            pytest.fail("it never waited for that process")
        try:
            yield child
        finally:
            child.kill()
