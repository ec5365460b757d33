"""However a builder ends, no compiler and no scratch directory outlives it by two seconds."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sample import signals
from sample.processes import ENDLESS, UNLIMITED, field, pids, watchdogs
from sample.quiet import within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(3), pytest.mark.timed]

# A program that builds: it registers a scratch directory and runs the compiler given to it. What
# it does besides is up to the test, which puts it in place of BEFORE and AROUND.
BUILDER = """
import os, sys, threading, time
from opkiln.run import process
scratch, mark, *compiler = sys.argv[1:]

def build():
    process.run(compiler, cwd=scratch, env={"ORPHAN_TEST": mark}, tmpdir=scratch)

BEFORE
print("ready", flush=True)
process._guard.register(scratch)
AROUND
"""


class Builder(NamedTuple):
    process: subprocess.Popen[str]
    scratch: str
    mark: str


@contextlib.contextmanager
def builder(
    tmp_path: Path, number: object = 0, *, before: str = "", around: str = "build()"
) -> Iterator[Builder]:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source = tmp_path / "endless.cpp"
    source.write_text(ENDLESS)
    # A path that a protocol of lines or of text would trip over.
    name = os.fsdecode(f"scratch {number}\n'\"$".encode() + b"\xff")
    scratch = os.path.join(tmp_path, name)
    os.makedirs(os.path.join(scratch, "deep", "er"))
    mark = f"{os.path.basename(tmp_path)}-{number}-{random.randrange(1 << 60)}"
    script = BUILDER.replace("BEFORE", before).replace("AROUND", around)
    output = os.path.join(scratch, "out.o")
    child = subprocess.Popen(
        [
            *(*signals.FOREGROUND, sys.executable, "-c", script, scratch, mark),
            *(compiler, *UNLIMITED, "-c", str(source), "-o", output),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield Builder(child, scratch, mark)
        finally:
            child.kill()
            for pid in marked(mark):  # only after a failure
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Living processes that inherited the test's mark."""
    return [pid for pid in pids() if f"ORPHAN_TEST={mark}".encode() in field(pid, "environ")]


def names(pids_: list[int]) -> set[str]:
    return {os.path.basename(os.fsdecode(field(pid, "cmdline")[0])) for pid in pids_}


def compiling(one: Builder) -> bool:
    return "cc1plus" in names(marked(one.mark))


def clean(one: Builder) -> bool:
    return not marked(one.mark) and not os.path.lexists(one.scratch)


def end_by(number: signal.Signals) -> Callable[[Builder], None]:
    return lambda one: one.process.send_signal(number)


def end_main_thread(one: Builder) -> None:
    with open(os.path.join(one.scratch, "leave"), "w"):
        pass


IN_A_THREAD = """
threading.Thread(target=build, daemon=True).start()
while not os.path.exists(os.path.join(scratch, "leave")):
    time.sleep(0.01)
sys.exit(0)
"""

WAYS = {
    "SIGINT": ("build()", end_by(signal.SIGINT)),
    "SIGTERM": ("build()", end_by(signal.SIGTERM)),
    "SIGHUP": ("build()", end_by(signal.SIGHUP)),
    "SIGKILL": ("build()", end_by(signal.SIGKILL)),
    "exit": (IN_A_THREAD, end_main_thread),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_compiler_and_no_scratch_outlives_its_builder(
    tmp_path: Path, way: str, cases: Cases
) -> None:
    around, end = WAYS[way]
    for number in cases(20, one_in=20):
        with builder(tmp_path, number, around=around) as one:
            assert within(20, lambda one=one: compiling(one))  # type: ignore[misc]
            end(one)
            assert within(10, lambda one=one: one.process.poll() is not None)  # type: ignore[misc]
            assert within(2, lambda one=one: clean(one))  # type: ignore[misc]


def test_a_builder_killed_at_any_moment_leaves_nothing(tmp_path: Path, cases: Cases) -> None:
    rng = random.Random(0)
    for number in cases(100, one_in=20):
        # From before the watchdog is started, through its start and the compiler's.
        with builder(tmp_path, number) as one:
            time.sleep(rng.uniform(0, 0.06))
            one.process.kill()
            pid = one.process.pid
            assert within(2, lambda pid=pid: not watchdogs(pid))  # type: ignore[misc]
            # One that is between fork and exec at the last look would show itself by now.
            time.sleep(0.1)
            assert marked(one.mark) == []


# A fork behind Python's back, as a C library does it: no hook runs, the child keeps the socket.
RAW_FORK = """
import ctypes
process._guard.register(scratch)
if ctypes.CDLL(None).fork() == 0:
    os.setsid()
    time.sleep(60)
    os._exit(0)
"""

WITHOUT_PIDFD = """
wrapper = os.path.join(os.path.dirname(scratch), "wrapper.py")
with open(wrapper, "w") as file:
    file.write(f"import os, runpy\\ndel os.pidfd_open\\n"
               f"runpy.run_path({process._WATCHDOG!r}, run_name='__main__')\\n")
process._WATCHDOG = wrapper
"""


@pytest.mark.parametrize("before", [RAW_FORK, WITHOUT_PIDFD + RAW_FORK], ids=["pidfd", "polling"])
def test_a_forked_child_that_holds_the_socket_does_not_hide_the_end_of_its_parent(
    tmp_path: Path, before: str
) -> None:
    with builder(tmp_path, before=before) as one:
        assert within(20, lambda: compiling(one))
        others = {pid for pid in pids() if one.mark.encode() in field(pid, "cmdline")}
        others -= {one.process.pid}
        assert others
        time.sleep(0.3)  # the watchdog is up: a parent gone before that is another test's matter
        try:
            one.process.kill()
            one.process.wait()
            assert within(2, lambda: clean(one))
            assert all(os.path.exists(f"/proc/{pid}") for pid in others)
        finally:
            for pid in others:
                os.kill(pid, signal.SIGKILL)


def test_a_watchdog_that_was_killed_is_replaced_and_knows_what_the_first_one_knew(
    tmp_path: Path,
) -> None:
    around = """
process.run(["true"])
watchdog = process._guard.child.pid
os.kill(watchdog, 9)
while open(f"/proc/{watchdog}/stat").read().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
build()
"""
    with builder(tmp_path, around=around) as one:
        assert within(20, lambda: compiling(one))
        assert len(watchdogs(one.process.pid)) == 1
        one.process.kill()
        one.process.wait()
        assert within(2, lambda: clean(one))


def test_the_watchdog_ignores_the_signals_that_end_its_parent(tmp_path: Path) -> None:
    with builder(tmp_path) as one:
        assert within(20, lambda: compiling(one))
        [watchdog] = watchdogs(one.process.pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(watchdog, number)
        one.process.send_signal(signal.SIGTERM)
        one.process.wait()
        assert within(2, lambda: clean(one))


def test_a_released_directory_outlives_its_builder(tmp_path: Path) -> None:
    around = "process._guard.release(scratch); build()"
    with builder(tmp_path, around=around) as one:
        assert within(20, lambda: compiling(one))
        one.process.kill()
        one.process.wait()
        assert within(2, lambda: not watchdogs(one.process.pid))
        assert marked(one.mark) == []
        assert os.path.isdir(os.path.join(one.scratch, "deep", "er"))


def test_a_thread_that_ends_and_a_forked_child_that_ends_leave_the_build_alone(
    tmp_path: Path,
) -> None:
    around = """
first = threading.Thread(target=process.run, args=(["true"],))  # this one starts the watchdog
first.start()
first.join()
threading.Thread(target=build, daemon=True).start()
time.sleep(0.2)
child = os.fork()
if child == 0:
    mine = process._guard.child is None
    process.run(["true"])  # starts a watchdog of its own
    sys.exit(0 if mine else 1)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(600)
"""
    with builder(tmp_path, around=around) as one:
        assert one.process.stdout is not None
        assert one.process.stdout.readline() == "child 0\n"
        assert within(20, lambda: compiling(one))
        time.sleep(0.3)
        assert compiling(one)
        assert os.path.isdir(one.scratch)
        one.process.kill()
        one.process.wait()
        assert within(2, lambda: clean(one))


def test_an_ordinary_exit_leaves_no_watchdog_and_no_warning(tmp_path: Path) -> None:
    script = "from opkiln.run import process; import os; process.run(['true']); print(os.getpid())"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert watchdogs(int(done.stdout)) == []


def test_without_an_interpreter_to_run_the_watchdog_builds_go_on_with_a_warning() -> None:
    script = (
        "import sys; sys.executable, sys.base_exec_prefix = '', '/nowhere'\n"
        "from opkiln.run import process; print(process.run(['echo', 'built']).output)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "built"
    assert "RuntimeWarning: compilers started here will outlive this process" in done.stderr
