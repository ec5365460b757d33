"""Taking turns to build: one at a time, nobody waits for the dead, everybody hears of a failure."""

from __future__ import annotations

import errno
import fcntl
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

from opkiln.errors import CompileError
from opkiln.store import lock
from opkiln.store.lock import Turn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLDER = """
import sys
from opkiln.errors import CompileError
from opkiln.store import lock
with lock.turn(sys.argv[1], "op", lambda: None, print) as turn:
    print("mine", flush=True)
    if sys.stdin.readline() == "fail\\n":
        turn.fail(CompileError("op: a.cpp does not compile", why="a.cpp:1: error", hint="mend it"))
"""


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
        with lock.turn(str(tmp_path), "op", never, ignore) as got:
            assert isinstance(got, Turn)


def test_what_arrived_meanwhile_is_taken_instead_of_a_turn(tmp_path: Path) -> None:
    with lock.turn(str(tmp_path), "op", lambda: "built", ignore) as got:
        assert got == "built"


def test_who_waits_is_told_for_whom(tmp_path: Path) -> None:
    seen: list[lock.Waiting] = []
    with holder(tmp_path) as child:

        def waiting(state: lock.Waiting) -> None:
            seen.append(state)
            if state.holder is not None and child.poll() is None:
                child.kill()

        with lock.turn(str(tmp_path), "op", never, waiting) as got:
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
        with lock.turn(str(tmp_path), "op", arrived, ignore) as got:
            assert got == "built"
        assert child.poll() is None


def test_a_killed_holder_does_not_block_the_next_one(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        os.kill(child.pid, signal.SIGKILL)
        with lock.turn(str(tmp_path), "op", never, ignore) as got:
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
            lock.turn(str(tmp_path), "op", never, waiting),
        ):
            pytest.fail("it was not our turn")
    assert str(caught.value) == "op: a.cpp does not compile\n  a.cpp:1: error\nhint: mend it"


def test_who_comes_after_a_failure_tries_anew(tmp_path: Path) -> None:
    with lock.turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)
        got.fail(CompileError("it did not compile"))
    with lock.turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)


def test_threads_of_one_process_take_turns_too(tmp_path: Path) -> None:
    inside, most, built = 0, 0, []
    guard = threading.Lock()

    def arrived() -> str | None:
        return "built" if built else None

    def build() -> None:
        nonlocal inside, most
        with lock.turn(str(tmp_path), "op", arrived, ignore) as got:
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
    with lock.turn(str(tmp_path), "op", never, ignore):
        pid = os.fork()
        if pid == 0:
            # Another op: its thread lock is free, and this one's holder is the parent.
            with lock.turn(str(tmp_path), "other", never, ignore) as got:
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
    with lock.turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)


def test_a_root_that_cannot_be_written_means_nobody_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with lock.turn(str(tmp_path / "file"), "op", never, ignore) as got:
        assert isinstance(got, Turn)
        got.fail(CompileError("this cannot be kept, which is fine"))


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "op").symlink_to(victim)
    with lock.turn(str(tmp_path), "op", never, ignore) as got:
        assert isinstance(got, Turn)
    assert victim.read_text() == "precious"
