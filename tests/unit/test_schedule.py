"""Running tasks in parallel, in order, within the budget."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from sample import signals

from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.run import budget, events, schedule
from opkiln.run.schedule import StepFailed, Task, execute
from opkiln.settings import override, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from opkiln.run.child import Completed
    from opkiln.run.events import Event

pytestmark = pytest.mark.timed


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path) -> Iterator[None]:
    with override(runtime_dir=str(tmp_path / "run"), max_jobs=None, memory=None):
        yield


def a_budget(slots: int) -> budget.Budget:
    limits = budget.Limits(tuple(range(slots)), 1 << 30, (1 << 30) // slots, "test", "test")
    return budget.Budget(limits, budget.shared_budget()._table)


def task(
    name: str,
    *argv: str,
    after: tuple[str, ...] = (),
    memory: int = 0,
    finish: Callable[[Completed], Callable[[], None] | None] | None = None,
) -> Task:
    return Task(
        name, "op", f"{name}.cpp", argv or ("true",), "/", {}, "/tmp", after, memory, finish
    )


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


def descendants_alive(name: str) -> list[str]:
    """Living processes that have ``name`` on their command line."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    if name.encode() in file.read().split(b"\0"):
                        found.append(pid)
            except OSError:
                continue
    return found


def test_results_come_by_name_and_dependencies_first() -> None:
    order: list[str] = []
    lock = threading.Lock()

    def noted(name: str) -> Callable[[Completed], None]:
        def finish(completed: Completed) -> None:
            time.sleep(0.02)  # a task that did not wait for this would come first
            with lock:
                order.append(name)

        return finish

    results = execute(
        [
            task("link", "echo", "linked", after=("a", "b"), finish=noted("link")),
            task("b", after=("generated",), finish=noted("b")),
            task("a", after=("generated",), finish=noted("a")),
            task("generated", finish=noted("generated")),
        ],
        timeout=60,
        budget=a_budget(4),
    )
    assert results["link"].output == "linked\n"
    assert results.keys() == {"link", "a", "b", "generated"}
    assert (order[0], set(order[1:3]), order[3]) == ("generated", {"a", "b"}, "link")


def test_independent_tasks_run_at_once(tmp_path: Path) -> None:
    # Each waits for the other's file: one after the other would never end.
    code = (
        "import os, sys, time\nopen(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)"
    )
    one, two = str(tmp_path / "1"), str(tmp_path / "2")
    execute(
        [task("one", *python(code), one, two), task("two", *python(code), two, one)],
        timeout=60,
        budget=a_budget(2),
    )


@pytest.mark.parametrize(("slots", "max_jobs", "memory"), [(2, None, 0), (4, 2, 0), (4, None, 2)])
def test_no_more_run_at_once_than_the_budget_allows(
    tmp_path: Path, slots: int, max_jobs: int | None, memory: int
) -> None:
    log = str(tmp_path / "log")
    code = (
        "import os, sys, time\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "os.write(fd, b'+1 '); time.sleep(0.05); os.write(fd, b'-1 ')"
    )
    shares = a_budget(slots)
    with override(max_jobs=max_jobs):
        execute(
            [
                task(str(n), *python(code), log, memory=memory * shares.limits.share)
                for n in range(6)
            ],
            timeout=60,
            budget=shares,
        )
    running = peak = 0
    for change in (tmp_path / "log").read_text().split():
        running += int(change)
        peak = max(peak, running)
    assert 1 <= peak <= 2
    assert running == 0


def test_threads_are_not_more_than_tasks_that_can_run() -> None:
    seen: list[int] = []

    def count(completed: Completed) -> None:
        seen.append(sum(thread.name == "opkiln-step" for thread in threading.enumerate()))

    execute([task("a", finish=count), task("b", after=("a",), finish=count)],
            timeout=60, budget=a_budget(64))  # fmt: skip
    assert seen == [1, 1]
    assert not any(thread.name == "opkiln-step" for thread in threading.enumerate())


def test_the_first_failure_is_raised_and_ends_the_others(tmp_path: Path) -> None:
    marker = str(tmp_path)
    later = tmp_path / "later"
    fail = python("import sys, time; time.sleep(0.3); print('no such header'); sys.exit(3)")
    with pytest.raises(StepFailed) as caught:
        execute(
            [
                task("long", *python("import time; time.sleep(600)"), marker),
                task("bad", *fail),
                task("later", "touch", str(later), after=("bad",)),
            ],
            timeout=60,
            budget=a_budget(2),
        )
    assert caught.value.task.name == "bad"
    assert caught.value.completed.returncode == 3
    assert caught.value.completed.output == "no such header\n"
    assert descendants_alive(marker) == []
    assert not later.exists()


def test_what_finish_raises_is_the_failure_and_nothing_after_it_runs(tmp_path: Path) -> None:
    class Refused(Exception):
        pass

    def refuse(completed: Completed) -> None:
        raise Refused

    later = tmp_path / "later"
    with pytest.raises(Refused):
        execute(
            [task("a", finish=refuse), task("b", "touch", str(later), after=("a",))],
            timeout=60,
            budget=a_budget(2),
        )
    assert not later.exists()


def test_what_finish_returns_runs_beside_later_tasks_and_ends_before_execute() -> None:
    later, done = threading.Event(), []

    def rest() -> None:
        assert later.wait(30), "the task after it does not wait for this"
        done.append("a")

    execute(
        [
            task("a", finish=lambda _: rest),
            task("b", after=("a",), finish=lambda _: later.set()),
        ],
        timeout=60,
        budget=a_budget(2),
    )
    assert done == ["a"]


def test_what_finish_returns_may_fail_and_runs_before_later_tasks_on_one_cpu() -> None:
    class Refused(Exception):
        pass

    later = []

    def refuse() -> None:
        raise Refused

    with pytest.raises(Refused):
        execute(
            [
                task("a", finish=lambda _: refuse),
                task("b", after=("a",), finish=lambda _: later.append("b")),
            ],
            timeout=60,
            budget=a_budget(1),
        )
    assert later == []


def test_finish_runs_with_the_slot_given_back() -> None:
    shares = a_budget(1)
    held: list[list[int]] = []

    def look(completed: Completed) -> None:
        held.append(list(shares._table._held))

    execute([task("a", finish=look)], timeout=60, budget=shares)
    assert held == [[]]


def test_timeouts_and_missing_programs_are_raised_as_themselves() -> None:
    with pytest.raises(BuildTimeout):
        execute([task("a", "sleep", "600")], timeout=0.2, budget=a_budget(1))
    with pytest.raises(ToolchainError):
        execute([task("a", "no-such-program")], timeout=60, budget=a_budget(1))


def test_what_came_before_the_first_step_is_a_part_of_its_time_and_of_no_later_one() -> None:
    before = time.monotonic() - 100
    with pytest.raises(BuildTimeout, match="true was not started within 60 s"):
        execute([task("a")], timeout=60, since=before, budget=a_budget(1))
    tasks = [task("a"), task("b", after=("a",)), task("c")]
    # The first one has 20 of its 120 seconds left; the others would have none.
    done = execute(tasks, timeout=120, since=before, budget=a_budget(1))
    assert sorted(done) == ["a", "b", "c"]
    began = time.monotonic()
    with override(build_timeout=600.0), pytest.raises(BuildTimeout, match="sleep was killed"):
        execute(
            [task("a", "sleep", "60")],
            timeout=time.monotonic() - before + 0.3,
            since=before,
            budget=a_budget(1),
        )
    assert time.monotonic() - began < 60


def test_an_interrupt_ends_every_process_before_it_reaches_the_caller(tmp_path: Path) -> None:
    marker = str(tmp_path)
    started = threading.Semaphore(0)

    def sink(event: Event) -> None:
        if event.kind == events.STEP_START:
            started.release()

    def interrupt() -> None:
        started.acquire()
        started.acquire()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    sleep = python("import time; time.sleep(600)")
    with signals.interruptible(), events.listen(sink), pytest.raises(KeyboardInterrupt):
        execute([task(str(n), *sleep, marker) for n in range(5)], timeout=60, budget=a_budget(2))
    thread.join()
    assert descendants_alive(marker) == []
    assert not any(thread.name == "opkiln-step" for thread in threading.enumerate())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("slots", [1, 2])
def test_two_threads_build_at_once_within_one_budget(tmp_path: Path, slots: int) -> None:
    shares = a_budget(slots)
    steps = 5
    code = 'echo "$1" >> "$2/begun"; until [ -e "$2/$1" ]; do sleep 0.01; done'
    (tmp_path / "begun").touch()

    def build(name: str) -> None:
        argv = ("sh", "-c", code, "sh")
        tasks = [task(str(n), *argv, f"{name}{n}", str(tmp_path)) for n in range(steps)]
        execute(tasks, timeout=60, budget=shares)

    def begun() -> list[str]:
        return (tmp_path / "begun").read_text().split()

    ended: list[str] = []

    def settled() -> bool:
        """Each slot has a step, and each build asks for the slots that it does not have."""
        running = [step for step in begun() if step not in ended]
        assert len(running) <= slots
        asking = 0
        for name in "ab":
            left = steps - sum(step[0] == name for step in begun())
            asking += min(left, slots - sum(step[0] == name for step in running))
        return (
            len(running) == min(slots, 2 * steps - len(ended))
            and len(shares._table._queue) == asking
        )

    threads = [threading.Thread(target=build, args=(name,)) for name in "ab"]
    with contextlib.ExitStack() as taken:
        for _ in range(slots):
            taken.enter_context(shares.hold())
        for thread in threads:
            thread.start()
        until(lambda: len(shares._table._queue) == 2 * slots)
    while len(ended) < 2 * steps:
        until(settled)
        of_a, of_b = (sum(step[0] == name for step in begun()) for name in "ab")
        assert abs(of_a - of_b) <= slots, begun()
        oldest = next(step for step in begun() if step not in ended)
        ended.append(oldest)
        (tmp_path / oldest).touch()
    for thread in threads:
        thread.join()
    assert sorted(begun()) == sorted(f"{name}{n}" for name in "ab" for n in range(steps))


def test_a_failure_in_one_build_leaves_another_thread_s_build_alone() -> None:
    shares = a_budget(2)
    results: dict[str, Completed] = {}
    started = threading.Event()

    def build() -> None:
        results.update(execute([task("ok", "sleep", "0.2")], timeout=60, budget=shares))

    with events.listen(lambda event: started.set()):
        thread = threading.Thread(target=build)
        thread.start()
        started.wait()
        with pytest.raises(StepFailed):
            execute([task("bad", "false")], timeout=60, budget=shares)
        thread.join()
    assert results["ok"].returncode == 0


def test_events_tell_each_step() -> None:
    heard: list[Event] = []
    with events.listen(heard.append):
        execute([task("a"), task("b", after=("a",))], timeout=60, budget=a_budget(1))
    assert [(event.kind, event.data["step"]) for event in heard] == [
        ("step-start", "a"), ("step-end", "a"), ("step-start", "b"), ("step-end", "b"),
    ]  # fmt: skip
    assert heard[1].data["cached"] is False
    assert heard[1].data["wall"] > 0


def test_an_event_tells_which_other_process_a_step_waits_for(tmp_path: Path) -> None:
    shares = a_budget(1)
    lock = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'r+')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)\nprint(flush=True)\nsys.stdin.read()"
    )
    other = subprocess.Popen(
        [*python(lock), str(tmp_path / "run" / "slots")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    heard: list[Event] = []

    def sink(event: Event) -> None:
        heard.append(event)
        if event.kind == events.WAITING:
            other.kill()  # and so the kernel gives the slot back

    with other, events.listen(sink):
        assert other.stdout is not None
        other.stdout.readline()
        # All the memory, so that the extra slot will not do.
        execute([task("a", memory=1 << 30)], timeout=60, budget=shares)
    assert [event.kind for event in heard] == ["waiting", "step-start", "step-end"]
    data = heard[0].data
    assert (data["op"], data["pid"], data["what"]) == ("op", other.pid, "a free CPU")
    assert data["host"] == os.uname().nodename
    assert data["seconds"] > 0


def test_steps_see_the_settings_of_the_caller() -> None:
    seen: list[str] = []
    with override(cxx="only-here"):
        execute(
            [task("a", finish=lambda completed: seen.append(settings.cxx))],
            timeout=60,
            budget=a_budget(1),
        )
    assert seen == ["only-here"]


def test_nothing_to_do_is_done() -> None:
    assert schedule.execute([], timeout=1) == {}


def test_a_step_is_run_with_as_many_threads_as_it_was_given_slots() -> None:
    given: list[int] = []

    def widened(threads: int) -> tuple[str, ...]:
        given.append(threads)
        return ("true",)

    wide = task("wide")._replace(threads=8, widened=widened)
    execute([wide], timeout=60, budget=a_budget(3))
    hungry = task("hungry", memory=(1 << 30) // 3 + 1)._replace(threads=8, widened=widened)
    execute([hungry], timeout=60, budget=a_budget(3))
    assert given == [3, 1], "memory for one thread takes two of the three slots"
