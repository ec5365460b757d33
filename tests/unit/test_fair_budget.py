"""The order in which processes get the slots of the budget.

Real processes run real steps through the engine. A step lasts until the test lets it end, so the
tests compare the order of events, and no step is too short or too long on a busy machine.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.quiet import within

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timed

# A process that runs steps in a budget of made-up CPUs. The log tells what each step does.
BUILD = """
import os, sys
from opkiln.run import budget, events, schedule, slots as table
from opkiln.settings import override

budget._FIRST_CALL, budget._NEXT_CALL, table.STARVING_AFTER = 0.05, 0.05, 0.1
table._UNSEEN_PASSED_AFTER = 0.5
place, name, slots, steps, memory, threads = sys.argv[1:]
log = os.open(f"{place}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
STEP = 'echo "+ $1" >> log; until [ -e "end/$2" ] || [ -e end/all ]; do sleep 0.02; done'

def step(number):
    def argv(given):
        shown = f"{name}.{number}" + (f" {given}" if threads != "1" else "")
        return ("sh", "-c", STEP + '; echo "- $1" >> log', "sh", shown, f"{name}.{number}")
    return schedule.Task(f"{number}", name, f"{number}", (), place, {}, place, (), int(memory),
                         None, int(threads), argv)

def heard(event):
    if event.kind == events.WAITING:
        os.write(log, f"? {name}\\n".encode())
        if event.data["seconds"] > 0.2:
            os.write(log, f"?? {name}\\n".encode())

with override(runtime_dir=f"{place}/run", max_jobs=None):
    cpus = tuple(map(int, slots.split(",")))
    limits = budget.Limits(cpus, 4 << 30, (4 << 30) // len(cpus), "test", "test")
    shares = budget.Budget(limits, budget.shared_budget()._table)
    with events.listen(heard):
        schedule.execute([step(number) for number in range(int(steps))], timeout=600, budget=shares)
"""


class Host:
    """Processes that build at once, and the log of their steps."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.started: list[subprocess.Popen[str]] = []
        (place / "end").mkdir()
        (place / "log").touch()

    def build(
        self,
        name: str,
        *,
        steps: int = 1,
        slots: tuple[int, ...] = (0, 1),
        memory: int = 0,
        threads: int = 1,
        prefix: tuple[str, ...] = (),
    ) -> subprocess.Popen[str]:
        """A process that has these steps to run."""
        cpus = ",".join(map(str, slots))
        new = child.start(
            BUILD, str(self.place), name, cpus, str(steps), str(memory), str(threads), prefix=prefix
        )
        self.started.append(new)
        return new

    def log(self) -> list[str]:
        return (self.place / "log").read_text().splitlines()

    def shown(self) -> str:
        """The log without repetitions."""
        return ", ".join(dict.fromkeys(self.log()))

    def begun(self, name: str = "") -> list[str]:
        """Steps that were started, in their order."""
        return [line[2:] for line in self.log() if line.startswith(f"+ {name}")]

    def until(self, *lines: str, count: int = 1) -> None:
        """Wait for these lines of the log, ``count`` times each."""
        came = within(30, lambda: all(self.log().count(line) >= count for line in lines))
        assert came, f"{lines} did not come after {self.shown()}"

    def until_waiting(self, name: str) -> None:
        """Wait until a process says, from now on, that it waits for a slot."""
        self.until(f"? {name}", count=self.log().count(f"? {name}") + 1)

    def until_starving(self, name: str) -> None:
        """Wait until a process waits for long enough to use the extra slot."""
        self.until(f"?? {name}", count=self.log().count(f"?? {name}") + 1)

    def until_begun(self, count: int) -> None:
        """Wait until so many steps were started."""
        came = within(30, lambda: len(self.begun()) >= count)
        assert came, f"no further step after {self.shown()}"

    def end(self, step: str) -> None:
        """Let a step end, and wait for that."""
        (self.place / "end" / step).touch()
        self.until(f"- {step}")

    def fill(self, steps: int = 6) -> subprocess.Popen[str]:
        """A long build on both CPUs, and another process's step on the extra slot."""
        long = self.build("long", steps=steps)
        self.until("+ long.0", "+ long.1")
        self.build("other")
        self.until("+ other.0")
        return long

    def close(self) -> None:
        (self.place / "end" / "all").touch()
        for each in self.started:
            if each.poll() is None:
                each.send_signal(signal.SIGCONT)
        for each in self.started:
            done = child.finish(each)
            assert done.returncode in (0, -signal.SIGKILL), done.stderr


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def test_a_small_step_starts_beside_a_build_whose_steps_do_not_end(host: Host) -> None:
    host.build("long", steps=6)
    host.until("+ long.0", "+ long.1")
    host.build("small")
    host.until("+ small.0")
    assert host.begun()[2:] == ["small.0"]


def test_a_long_queue_starts_no_further_step_before_one_of_a_process_that_has_none(
    host: Host,
) -> None:
    host.build("long", steps=6)
    host.until("+ long.0", "+ long.1")
    host.build("small")
    host.until_waiting("small")
    host.end("long.0")
    host.until_begun(3)
    # On a slow machine it has starved by now, and has the extra slot; then long.2 follows long.0.
    assert host.begun()[2] == "small.0"


def test_the_next_free_slot_goes_to_the_process_that_has_none(host: Host) -> None:
    host.fill()
    host.build("small", steps=3)
    host.until_waiting("small")
    host.end("long.0")
    host.until("+ small.0")
    # Each has one slot now, and whoever ends a step starts the next.
    host.end("long.1")
    host.until("+ long.2")
    host.end("small.0")
    host.until("+ small.1")
    assert host.begun()[3:] == ["small.0", "long.2", "small.1"]


def test_starving_processes_use_the_extra_slot_in_turn_one_step_at_a_time(host: Host) -> None:
    host.build("long", steps=2)
    host.until("+ long.0", "+ long.1")
    host.build("a", steps=3)
    host.until("+ a.0")
    host.build("b", steps=3)
    for step, following in (("a.0", "b.0"), ("b.0", "a.1"), ("a.1", "b.1"), ("b.1", "a.2")):
        host.until_starving(following[0])
        host.end(step)
        host.until(f"+ {following}")
    assert host.begun()[2:] == ["a.0", "b.0", "a.1", "b.1", "a.2"]
    running = 0
    for line in host.log():
        running += {"+": 1, "-": -1}.get(line[0], 0)
        assert running <= 3


def test_a_stopped_process_holds_no_slot_and_gets_it_again_when_it_is_free(host: Host) -> None:
    long = host.fill()
    host.build("small")
    host.until_waiting("small")
    long.send_signal(signal.SIGSTOP)
    host.until("+ small.0")
    long.send_signal(signal.SIGCONT)
    host.end("long.0")  # its slot is small's now
    host.until_waiting("long")
    host.end("small.0")
    host.until("+ long.2")
    log = host.log()
    assert log.index("- small.0") < log.index("+ long.2")


def test_a_stopped_process_holds_no_extra_slot(host: Host) -> None:
    host.fill()
    host.build("small")
    host.until_waiting("small")
    host.started[1].send_signal(signal.SIGSTOP)
    host.until("+ small.0")


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_waiter_that_cannot_go_on_holds_nobody_up(host: Host, how: signal.Signals) -> None:
    host.fill()
    first = host.build("first")
    host.until_waiting("first")
    host.build("second")
    host.until_waiting("second")
    first.send_signal(how)
    host.end("long.0")
    host.until("+ second.0")
    assert host.begun("first") == []


def test_a_killed_process_leaves_its_slots_and_its_place(host: Host) -> None:
    long = host.fill()
    host.started[1].kill()  # the extra slot's
    host.build("a")
    host.until("+ a.0")
    long.kill()
    host.build("b", slots=(0, 1), memory=4 << 30)  # both slots
    host.until_waiting("b")
    host.end("a.0")
    host.until("+ b.0")


def in_another_pid_namespace() -> tuple[str, ...]:
    prefix = ("unshare", "--pid", "--fork", "--kill-child")
    found = shutil.which("unshare")
    if not found or subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no pid namespace can be made here")
    return prefix


def test_a_waiter_in_another_pid_namespace_goes_first_unless_it_leaves_slots_unused(
    host: Host,
) -> None:
    host.build("long", steps=6, prefix=in_another_pid_namespace())  # it sees no other process
    host.until("+ long.0", "+ long.1")
    host.build("other")
    host.until("+ other.0")
    host.build("first")
    host.until_waiting("first")
    host.end("long.0")
    host.until("+ first.0")
    assert host.begun("long.2") == []
    host.end("first.0")
    host.until("+ long.2")
    unseen = host.build("unseen")
    host.until_waiting("unseen")
    unseen.send_signal(signal.SIGSTOP)
    host.end("long.1")
    host.until("+ long.3")
    assert host.begun("unseen") == []


@pytest.mark.parametrize("mine", [(2, 3), (1, 9)], ids=["apart", "siblings"])
def test_processes_on_other_cpus_do_not_wait_for_each_other(
    host: Host, mine: tuple[int, ...]
) -> None:
    cpus = (0, 8) if mine == (1, 9) else (0, 1)
    host.build("long", steps=4, slots=cpus)
    host.until("+ long.0", "+ long.1")
    host.build("other", slots=cpus)
    host.until("+ other.0")
    host.build("waiter", slots=cpus)
    host.until_waiting("waiter")
    host.build("elsewhere", steps=2, slots=mine)
    host.until("+ elsewhere.0", "+ elsewhere.1")
    assert host.begun("waiter") == []


def test_a_step_that_needs_several_slots_is_not_passed_by_smaller_ones(host: Host) -> None:
    host.fill()
    host.build("wide", memory=3 << 30)
    host.until_waiting("wide")
    host.end("long.0")
    host.until_waiting("long")
    host.end("long.1")
    host.until("+ wide.0")
    assert host.begun("long.2") == []


def test_a_step_with_threads_takes_one_slot_while_others_wait(host: Host) -> None:
    cpus = (0, 1, 2, 3)
    host.build("long", steps=2, slots=cpus, threads=4)
    host.until("+ long.0 4")
    host.build("other", slots=cpus)
    host.until("+ other.0")
    for name in ("a", "b"):
        host.build(name, slots=cpus, threads=4)
        host.until_waiting(name)
    (host.place / "end" / "long.0").touch()
    host.until("- long.0 4")
    # The last to wait takes what the two before it left.
    host.until("+ a.0 1", "+ b.0 1", "+ long.1 2")


@pytest.mark.parametrize("who", ["the step", "the others"])
def test_the_extra_slot_is_not_used_beyond_the_memory(host: Host, who: str) -> None:
    large, small = (2 << 30, 1 << 30) if who == "the others" else (1 << 30, 3 << 30)
    host.build("long", steps=3, memory=large)
    host.until("+ long.0", "+ long.1")
    host.build("starving", memory=small)
    host.until_starving("starving")
    assert host.begun("starving") == []
    host.build("tiny", memory=1)  # the large one does not keep the extra slot from it
    if who == "the step":
        host.until("+ tiny.0")
        host.end("tiny.0")
    host.end("long.0")
    if who == "the step":
        host.end("long.1")
    host.until("+ starving.0")


def test_a_step_on_a_cpu_waits_until_the_extra_slot_s_memory_is_free(host: Host) -> None:
    host.build("long", steps=2, memory=1 << 30)
    host.until("+ long.0", "+ long.1")
    host.build("starving", memory=2 << 30)
    host.until("+ starving.0")
    host.end("long.0")
    host.build("large", memory=2 << 30)  # beside 1 and 2 GiB, with 4 in all
    host.until_waiting("large")
    host.end("starving.0")
    host.until("+ large.0")
    assert host.log().index("- starving.0") < host.log().index("+ large.0")


def test_two_threads_of_a_process_get_slots_in_the_order_they_asked(tmp_path: Path) -> None:
    code = """
    import sys, threading
    from opkiln.run import budget
    from opkiln.settings import override
    with override(runtime_dir=sys.argv[1], max_jobs=None):
        limits = budget.Limits((0,), 1 << 30, 1 << 30, "test", "test")
        shares = budget.Budget(limits, budget.shared_budget()._table)
        order, threads = [], []
        def ask(number):
            with shares.hold():
                order.append(number)
        with shares.hold():
            for number in range(8):
                thread = threading.Thread(target=ask, args=(number,))
                thread.start()
                threads.append(thread)
                while len(shares._table._queue) <= number:
                    pass
        for thread in threads:
            thread.join()
        print(*order)
    """
    assert child.run(code, str(tmp_path)) == "0 1 2 3 4 5 6 7\n"
