"""The build farm, with real workers and real compilers."""

from __future__ import annotations

import itertools
import json
import os
import re
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample.farm import Farm
from sample.levels import HIGH, LOW

from opkiln.errors import BuildError, CompileError
from opkiln.ship import farm as coordinator
from opkiln.ship.farm import Job, Result, work
from opkiln.ship.prebuild import BUILT, BuildOutcome
from opkiln.ship.selection import NamedTarget

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    return Farm(tmp_path_factory.mktemp("farm"))


@pytest.fixture
def here(farm: Farm, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Farm:
    """The ops are installed for this process, too."""
    monkeypatch.syspath_prepend(str(farm.site))
    return farm


def test_a_farm_that_loses_a_worker_writes_the_same_bytes_as_one_machine(farm: Farm) -> None:
    farm.write_recipes(("ProcessPoolExecutor(4", "ProcessPoolExecutor(2"))
    matrix = ("--targets", str(farm.matrix))
    alone, together = farm.base / "alone", farm.base / "together"
    one = farm(*matrix, "--bundle", f"{alone}.bundle", "--wheel", f"{alone}.wheels",
               store=farm.store())  # fmt: skip
    assert one.returncode == 0, one.stderr
    killed, trace, store = farm.base / "killed", farm.base / "trace.json", farm.store()
    many = farm(*matrix, "--executor", "farms:processes", "-j", "1", "--trace", str(trace),
                "--bundle", f"{together}.bundle", "--wheel", f"{together}.wheels",
                store=store, KILL_A_WORKER=str(killed))  # fmt: skip
    assert many.returncode == 0, many.stderr
    assert killed.exists()
    assert Path(f"{alone}.bundle").read_bytes() == Path(f"{together}.bundle").read_bytes()
    (wheel,) = Path(f"{alone}.wheels").iterdir()
    (same,) = Path(f"{together}.wheels").iterdir()
    assert (wheel.name, wheel.read_bytes()) == (same.name, same.read_bytes())

    rows = [line.split()[:4] for line in many.stdout.splitlines()[1:5]]
    pairs = itertools.product(("first", "second"), (LOW, HIGH))
    assert rows == [[op, "cpu", level, "built"] for op, level in pairs]
    lines = re.findall(r"^\[(\d)/4\] built \w+ cpu:\S+ in [\d.]+ s on \S+ pid \d+$", many.stderr,
                       re.MULTILINE)  # fmt: skip
    assert lines == ["1", "2", "3", "4"]

    records = json.loads(trace.read_text())["traceEvents"]
    workers = {each["pid"]: each["args"]["name"] for each in records
               if each["name"] == "process_name"}  # fmt: skip
    assert {" ".join(line.split()[-3:]) for line in many.stderr.splitlines() if line[0] == "["} == {
        *workers.values()
    }
    compiles = [each for each in records if each["ph"] == "X" and "add.cpp" in each["name"]]
    assert {each["cat"] for each in compiles} == {
        f"{op} cpu:{level}" for op, level in
        itertools.product(("first", "second"), (LOW, HIGH))
    }  # fmt: skip
    assert {each["pid"] for each in compiles} <= workers.keys()

    again = farm(*matrix, "--executor", "farms:processes", store=store)
    assert [line.split()[3] for line in again.stdout.splitlines()[1:5]] == ["cached"] * 4
    assert again.stderr == ""  # nothing was started


def test_an_error_of_a_worker_is_shown_with_the_op_and_the_others_are_built(here: Farm) -> None:
    source = here.ops["second"] / "csrc/add.cpp"
    text = source.read_text()
    source.write_text("int add( {\n")
    try:
        with ThreadPoolExecutor(1) as executor:
            good, bad = coordinator.build(["first", "second"], [f"cpu:{LOW}"], executor)
    finally:
        source.write_text(text)
    assert (good.status, good.error) == (BUILT, None)
    assert Path(good.path).exists()
    assert isinstance(bad.error, CompileError)
    assert "second" in bad.error.what
    assert "add.cpp:1" in bad.error.why
    assert f"for cpu:{LOW}, on {os.uname().nodename} pid {os.getpid()}" in bad.error.why
    assert "log: " not in bad.error.why  # it ends with the worker


class Directly(Executor):
    """Runs each task when it is submitted, by a function of the test."""

    def __init__(self, run: Callable[[Job], Result]) -> None:
        self.run = run

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert fn is work
        future: Future[Any] = Future()
        try:
            future.set_result(self.run(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def test_what_a_worker_built_from_other_sources_is_refused(here: Farm) -> None:
    source = here.ops["first"] / "csrc/add.cpp"
    text = source.read_text()

    def with_other_sources(job: Job) -> Result:
        source.write_text(f"{text}\nint one_more() {{ return 1; }}\n")
        try:
            return work(job)
        finally:
            source.write_text(text)

    (outcome,) = coordinator.build(["first"], [f"cpu:{HIGH}"], Directly(with_other_sources))
    assert isinstance(outcome.error, BuildError)
    assert "op first came from a worker that differs from this machine" in outcome.error.what
    assert outcome.path == ""


# Lost workers, by executors that break as a test wants

JOBS = {number: Job(f"op{number}", NamedTarget("cpu", LOW)) for number in range(6)}


def built(job: Job) -> Result:
    return Result(BuildOutcome(job.op, BUILT))


def test_a_task_that_ends_its_worker_is_found_and_the_others_are_done() -> None:
    tried: list[str] = []

    def run(job: Job) -> Result:
        tried.append(job.op)
        if job.op == "op2":
            raise BrokenExecutor("a process ended")
        return built(job)

    ended = {each.number: each.result for each in coordinator.results(JOBS, lambda: Directly(run))}
    assert sorted(ended) == sorted(JOBS)
    (lost,) = [each.outcome.error for each in ended.values() if each.outcome.error is not None]
    assert "op op2 was not built: its worker was lost" in lost.what
    assert "BrokenExecutor: a process ended" in lost.why
    assert 3 <= tried.count("op2") <= 5


def test_a_task_that_is_lost_once_runs_again_on_the_same_executor() -> None:
    tried: list[str] = []

    def run(job: Job) -> Result:
        tried.append(job.op)
        if job.op == "op1" and tried.count("op1") == 1:
            raise OSError("the worker is gone")
        return built(job)

    ended = list(coordinator.results(JOBS, Directly(run)))
    assert all(each.result.outcome.status == BUILT for each in ended)
    assert tried.count("op1") == 2
    assert len(tried) == len(JOBS) + 1


def test_an_executor_that_was_given_and_breaks_is_an_error_for_what_is_left() -> None:
    def run(job: Job) -> Result:
        raise BrokenExecutor("gone")

    ended = list(coordinator.results(JOBS, Directly(run)))
    assert [each.number for each in ended] == list(JOBS)
    assert all("its worker was lost" in str(each.result.outcome.error) for each in ended)
