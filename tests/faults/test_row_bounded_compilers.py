"""Row 28: all processes of a user together run as many compilers as the host has room for.

That is one for each CPU, and one more for a process that would starve (run/slots.py).
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, learn, let_rest, returning, write
from sample import child
from sample.quiet import within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fault_rows import Cases

pytestmark = [pytest.mark.row(28), pytest.mark.timed]

SOURCES = 4
CPUS = len(os.sched_getaffinity(0))


class Watched:
    """A compiler that notes when each compile begins and ends, and who asked for it."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        self.path = write(
            directory / "g++",
            '#!/bin/sh\ncase " $* " in\n*" -c "*) ;;\n'
            f'*) exec {shutil.which("g++")} "$@" ;;\nesac\n'
            f'echo "+ $$ $PPID" >> "{self.log}"\nsleep 0.1\n'
            f'{shutil.which("g++")} "$@"\nended=$?\n'
            f'echo "- $$ $PPID" >> "{self.log}"\nexit $ended\n',
        )
        self.path.chmod(0o755)

    def note(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{line}\n")

    def peak(self, processes: list[Loader]) -> tuple[int, int]:
        """(the most compilers that ran at once for living processes, all that were started).

        A compiler whose process was killed before it could note its parent has another parent: it
        is on its way out, as all compilers of a process that was killed.
        """
        running: dict[str, str] = {}
        living = {str(each.process.pid) for each in processes}
        most = started = 0
        for line in self.log.read_text().splitlines():
            kind, compiler, asked = line.split()
            if kind == "+" and asked in living:
                running[compiler] = asked
                started += 1
            elif kind == "-":
                running.pop(compiler, None)
            elif kind == "k":  # about to be killed: its compilers end a moment later
                living.discard(asked)
                running = {pid: who for pid, who in running.items() if who != asked}
            most = max(most, len(running))
        return most, started


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Path]:
    """The compiler, and what is known of it: what a test runs are builds alone."""
    made = Watched(tmp_path_factory.mktemp("compiler"))
    let_rest()
    return made, learn(made.path)


@pytest.fixture
def watched(made: tuple[Watched, Path], use: Callable[[Path, Path], None]) -> Watched:
    compiler, learnt = made
    compiler.log.unlink()
    use(compiler.path, learnt)
    return compiler


def sources(directory: Path, number: int) -> list[Path]:
    made = [write(directory / f"op{number}" / "a.cpp", returning(number))]
    for each in range(1, SOURCES):
        text = f"int other{each}() {{ return {number}; }}\n"
        made.append(write(directory / f"op{number}" / f"s{each}.cpp", text))
    return made


def build_at_once(tmp_path: Path, running: list[Loader], watched: Watched, kill: int) -> None:
    chance = random.Random(28)
    for number, each in enumerate(running):
        each.ask(f"op{number}", sources(tmp_path / "src", number))
    for victim in running[:kill]:
        time.sleep(chance.uniform(0.1, 0.5))
        watched.note(f"k 0 {victim.process.pid}")
        victim.kill()
    for number, each in enumerate(running):
        if number >= kill:
            assert each.answer().value == number


def test_all_processes_together_run_one_compiler_for_each_cpu_and_one_for_the_starving(
    tmp_path: Path,
    watched: Watched,
    processes: Callable[..., list[Loader]],
    cases: Cases,
) -> None:
    running = processes(8 if cases.whole else 4)
    killed = 3 if cases.whole else 1
    build_at_once(tmp_path, running, watched, killed)
    most, started = watched.peak(running)
    cases.tried(started)
    assert started >= (len(running) - killed) * SOURCES
    assert 1 <= most <= CPUS + 1
    # A killed holder's share is free again: one more build has every CPU.
    (late,) = processes(1)
    assert late.load("late", sources(tmp_path / "late", 99)).value == 99


def test_little_memory_means_few_compilers_whatever_the_cpus(
    tmp_path: Path,
    watched: Watched,
    processes: Callable[..., list[Loader]],
    cases: Cases,
) -> None:
    running = processes(4 if cases.whole else 2, {"OPKILN_MEMORY": "64M"})
    build_at_once(tmp_path, running, watched, 1)
    most, started = watched.peak(running)
    cases.tried(started)
    assert most == 1


@pytest.fixture
def group() -> Iterator[Callable[..., str]]:
    """Makes a control group, and gives the shell commands that put a process in it."""
    made: list[Path] = []

    def make(controller: str, **limits: str) -> str:
        top = Path("/sys/fs/cgroup") / controller
        own = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines()]
        if not top.is_dir() or controller not in [name for _, name, _ in own]:
            pytest.skip(f"no control groups of version 1 for {controller}")
        place = top / f"opkiln-faults-{os.getpid()}"
        try:
            place.mkdir()
            made.append(place)
            for name, value in limits.items():
                (place / f"{controller}.{name}").write_text(value)
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        return f"echo $$ > {place}/cgroup.procs"

    yield make
    for place in made:
        assert within(10, functools.partial(removed, place)), f"{place} is still in use"


def removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False  # a process is still in it
    return True


MEASURE = """
import json
from opkiln.run import budget
print(json.dumps(budget.measure()._asdict()))
"""


def inside(*joining: str) -> list[str]:
    return ["sh", "-c", " && ".join([*joining, 'exec "$@"']), "sh"]


def test_the_limits_of_a_control_group_are_the_budget(
    tmp_path: Path,
    watched: Watched,
    group: Callable[..., str],
    processes: Callable[..., list[Loader]],
    cases: Cases,
) -> None:
    limit = 512 << 20
    memory = group("memory", limit_in_bytes=str(limit))
    cpu = group("cpu", cfs_period_us="100000", cfs_quota_us="100000")
    found = json.loads(child.run(MEASURE, prefix=inside(memory)))
    assert found["memory"] == int(0.8 * limit)
    assert found["memory_from"] == "80% of the cgroup's limit"
    found = json.loads(child.run(MEASURE, prefix=inside(cpu)))
    assert len(found["slots"]) == 1
    running = processes(3 if cases.whole else 2, prefix=inside(memory, cpu))
    build_at_once(tmp_path, running, watched, 0)
    most, started = watched.peak(running)
    cases.tried(started)
    assert most == 1
