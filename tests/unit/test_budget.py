"""The budget of CPUs and memory that all builds of a user on a host share."""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from opkiln.errors import BuildCancelled, BuildTimeout
from opkiln.run import budget, events, slots
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opkiln.run.events import Event

pytestmark = pytest.mark.timed

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path) -> Iterator[None]:
    with override(runtime_dir=str(tmp_path / "run"), memory=4 * GIB, max_jobs=None):
        yield


def a_budget(slots: int = 4) -> budget.Budget:
    """This test's lock file, with made-up CPUs (a slot is only a byte's offset)."""
    table = budget.shared_budget()._table
    return budget.Budget(
        budget.Limits(tuple(range(slots)), 4 * GIB, 4 * GIB // slots, "test", "test"), table
    )


# A process that takes slots, says which, and gives them back when its input closes.
HOLDER = """
import sys
from opkiln.run import budget
from opkiln.settings import override
directory, slots, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with override(runtime_dir=directory):
    limits = budget.Limits(tuple(range(slots)), 4 << 30, (4 << 30) // slots, "test", "test")
    shared = budget.Budget(limits, budget.shared_budget()._table)
    with shared.hold(memory=memory) as taken:
        print(*taken, flush=True)
        sys.stdin.read()
"""


@contextlib.contextmanager
def holder(directory: Path, slots: int = 4, memory: int = 0) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory / "run"), str(slots), str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> list[int]:
    assert child.stdout is not None
    return [int(word) for word in child.stdout.readline().split()]


def refused(shares: budget.Budget, memory: int = 0) -> bool:
    """Whether a step gets no slot, though it tries several times."""
    later = threading.Event()
    timer = threading.Timer(0.05, later.set)
    timer.start()
    try:
        with shares.hold(memory=memory, cancelled=later):
            return False
    except BuildCancelled:
        return True
    finally:
        timer.cancel()
        timer.join()


def test_a_step_takes_as_many_slots_as_its_memory_needs() -> None:
    shares = a_budget(4)
    for memory, taking in ((0, 1), (GIB, 1), (GIB + 1, 2), (3 * GIB, 3), (400 * GIB, 4)):
        with shares.hold(memory=memory) as taken:
            assert len(taken) == taking


def test_a_step_with_threads_takes_the_slots_that_are_free_and_one_at_least() -> None:
    shares = a_budget(4)
    with shares.hold(threads=3) as wide:
        assert len(wide) == 3
        with shares.hold(threads=3) as narrow:
            assert len(narrow) == 1
    with shares.hold(memory=2 * GIB, threads=8) as hungry:
        assert len(hungry) == 4
    with override(max_jobs=2), shares.hold(threads=8) as bounded:
        assert len(bounded) == 2


def test_slots_of_two_processes_never_overlap_and_a_waiter_learns_whom_it_waits_for(
    tmp_path: Path,
) -> None:
    shares = a_budget(4)
    with holder(tmp_path, memory=3 * GIB) as child:
        assert said(child) == [0, 1, 2]
        with shares.hold() as taken:
            assert taken == (3,)
        told: list[tuple[int, float]] = []
        enough = threading.Event()

        def waiting(pid: int, seconds: float) -> None:
            told.append((pid, seconds))
            enough.set()

        with (
            pytest.raises(BuildCancelled),
            shares.hold(memory=2 * GIB, waiting=waiting, cancelled=enough),
        ):
            pytest.fail("the slots were taken")
        assert [pid for pid, _ in told] == [child.pid]


def test_who_cannot_have_all_the_slots_it_needs_holds_none(tmp_path: Path) -> None:
    shares = a_budget(4)
    with holder(tmp_path) as first:
        assert said(first) == [0]
        with holder(tmp_path, memory=3 * GIB) as second:
            assert said(second) == [1, 2, 3]
            first.kill()
            first.wait()
            assert refused(shares, memory=2 * GIB)
            with holder(tmp_path) as third:
                assert said(third) == [0]


def test_a_killed_holder_frees_its_slots(tmp_path: Path) -> None:
    shares = a_budget(2)
    with holder(tmp_path, 2, 4 * GIB) as child:
        assert said(child) == [0, 1]
        timer = threading.Timer(0.1, child.send_signal, (signal.SIGKILL,))
        timer.start()
        with shares.hold(memory=4 * GIB) as taken:
            assert taken == (0, 1)
            assert child.wait() == -signal.SIGKILL
        timer.join()


COUNTER = """
import fcntl, os, sys, time
from opkiln.run import budget
from opkiln.settings import override
directory, log = sys.argv[1:]
with override(runtime_dir=directory):
    limits = budget.Limits((0, 1, 2), 3 << 30, 1 << 30, "test", "test")
    shared = budget.Budget(limits, budget.shared_budget()._table)
    for turn in range(4):
        with shared.hold(memory=(1 + turn % 2) << 30) as taken:
            fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(fd, f"+{taken}\\n".encode())
            time.sleep(0.01)
            os.write(fd, f"-{taken}\\n".encode())
            os.close(fd)
"""


def test_many_processes_together_never_hold_more_than_there_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "run").mkdir(0o700)
    argv = [sys.executable, "-c", COUNTER, str(tmp_path / "run"), str(log)]
    children = [subprocess.Popen(argv) for _ in range(6)]
    assert [child.wait() for child in children] == [0] * 6
    held: set[int] = set()
    lines = log.read_text().splitlines()
    for line in lines:
        taken = set(ast.literal_eval(line[1:]))
        if line.startswith("+"):
            assert taken <= {0, 1, 2, slots.EXTRA}
            assert not held & taken, f"{line} while {held} are held"
            held |= taken
        else:
            held -= taken
    assert len(lines) == 6 * 4 * 2
    assert held == set()


def test_threads_of_one_process_share_the_same_slots() -> None:
    shares = a_budget(2)
    running, peak = 0, 0
    lock = threading.Lock()
    meeting = threading.Barrier(2, timeout=60)

    def work() -> None:
        nonlocal running, peak
        with shares.hold():
            with lock:
                running += 1
                peak = max(peak, running)
            meeting.wait()  # two at once, or it ends in BrokenBarrierError
            with lock:
                running -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peak == 2
    assert not meeting.broken


def test_max_jobs_bounds_the_steps_of_this_process() -> None:
    shares = a_budget(4)
    with override(max_jobs=2), shares.hold(), shares.hold():
        assert refused(shares)
    with shares.hold(), shares.hold(), shares.hold():
        pass


def test_a_forked_child_holds_nothing_and_leaves_its_parents_slots_alone(tmp_path: Path) -> None:
    shares = a_budget(2)
    with shares.hold():
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException), shares.hold() as taken:
                status = 0 if taken == (1,) else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with holder(tmp_path, 2) as other:  # slot 0 is still ours
            assert said(other) == [1]


def test_leaving_the_block_in_a_child_forked_inside_it_breaks_nothing(tmp_path: Path) -> None:
    shares = a_budget(2)
    child = -1
    with shares.hold():
        child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException), override(max_jobs=1), shares.hold():
            status = 0 if refused(shares) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_budgets_on_one_file_do_not_drop_each_others_locks(tmp_path: Path) -> None:
    with a_budget(2).hold() as taken:
        budget.shared_budget()
        before = os.listdir("/proc/self/fd")
        with override(memory=1 * GIB):  # other settings, so another Budget, on the same file
            second = budget.shared_budget()
        assert second is not budget.shared_budget()
        assert os.listdir("/proc/self/fd") == before
        assert taken == (0,)
        with holder(tmp_path, 2) as other:
            assert said(other) == [1]


@pytest.mark.parametrize("case", ["writable by others", "a symlink", "a file"])
def test_a_directory_that_is_not_private_is_refused_and_the_next_one_serves(
    tmp_path: Path, case: str
) -> None:
    place = tmp_path / "place"
    if case == "writable by others":
        place.mkdir()
        place.chmod(0o777)
    elif case == "a symlink":
        (tmp_path / "real").mkdir(0o700)
        place.symlink_to(tmp_path / "real")
    else:
        place.touch()
    notes: list[Event] = []
    with events.listen(notes.append), override(runtime_dir=str(place)):
        described = budget.shared_budget().describe()
    assert described.where is not None
    assert str(place) not in described.where
    assert described.refused[0].startswith(f"{place}: ")
    assert [event.kind for event in notes] == ["note"]
    assert not (tmp_path / "real" / "slots").exists()


def test_with_no_directory_at_all_the_budget_holds_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: str) -> slots.SlotTable:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(budget, "_open_table", refuse)
    notes: list[Event] = []
    with events.listen(notes.append), override(runtime_dir=str(tmp_path / "other")):
        alone = budget.shared_budget()
    assert alone.describe().where is None
    assert len(alone.describe().refused) == 3
    assert "this process only" in notes[-1].data["text"]
    with alone.hold(memory=400 * GIB):
        assert refused(alone)


def test_locks_that_fail_leave_a_budget_within_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = a_budget(2)

    def no_locks(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    notes: list[Event] = []
    with events.listen(notes.append), shares.hold() as one, shares.hold() as two:
        assert {*one, *two} == {0, 1}
        assert refused(shares)
    assert [event.kind for event in notes] == ["note"]
    assert "No locks available" in shares.describe().refused[-1]
    assert shares.describe().where is None


def test_a_wait_for_a_free_cpu_ends_at_its_limit_and_names_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_FIRST_CALL", 0.05)
    shares = a_budget(1)
    with holder(tmp_path, slots=1) as first, holder(tmp_path, slots=1) as second:
        assert sorted(said(first) + said(second)) == [0, slots.EXTRA]
        with (
            pytest.raises(BuildTimeout, match="gave up waiting for a free CPU") as caught,
            shares.hold(limit=0.3),
        ):
            pytest.fail("there was no free slot")
        assert "ended in 0.3 s" in caught.value.why
        assert str(first.pid) in caught.value.what or str(second.pid) in caught.value.what
    with shares.hold(limit=0.3):
        pass


def test_a_wait_goes_on_while_steps_of_this_process_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, later = a_budget(1), threading.Event()
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        now += 0.25
        shares._table._given += 1  # another step has ended
        if now > 3:
            later.set()
        return now

    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=monotonic))
    with shares.hold(), pytest.raises(BuildCancelled), shares.hold(limit=1.5, cancelled=later):
        pytest.fail("there was no free slot")
