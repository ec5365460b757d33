"""Processes that wait for a build: each has a limit, and time-outs do not add up."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.compiler import Compiler
from sample.quiet import within

import opkiln
from opkiln.errors import BuildTimeout

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

LIMIT = 10.0
LOAD = """
    import sys, time, opkiln
    from opkiln import errors
    try:
        library = opkiln.load("op", [sys.argv[1]], is_python_module=False, abi="none")
        print(library.value())
    except errors.OpkilnError as error:
        print(f"{type(error).__name__}: {error}")
    print(time.time())
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def source(tmp_path: Path, text: str = "") -> Path:
    made = tmp_path / "op.cpp"
    made.write_text(f'extern "C" int value() {{ return 7; }}\n{text}')
    return made


def start(path: Path, count: int, **env: str) -> list[subprocess.Popen[str]]:
    return [child.start(LOAD, str(path), env=env) for _ in range(count)]


def ends(children: list[subprocess.Popen[str]]) -> tuple[list[str], list[float]]:
    """What each of them said, and when it ended."""
    finished = [child.finish(each) for each in children]
    assert [each.returncode for each in finished] == [0] * len(finished), finished
    done = [each.stdout.rstrip().rpartition("\n") for each in finished]
    return [said for said, _, _ in done], [float(when) for _, _, when in done]


def test_a_time_out_of_the_compiler_ends_all_who_wait_for_it_at_once(
    tmp_path: Path, compiler: Compiler
) -> None:
    compiler.write(before="case \"$*\" in *' -c '*op.cpp*) sleep 600;; esac")
    waiting = start(source(tmp_path), 4, OPKILN_BUILD_TIMEOUT=str(LIMIT))
    said, when = ends(waiting)
    error = f"BuildTimeout: {compiler.path} was killed, because it did not end within {LIMIT:g} s"
    # On a busy machine, a waiter's own limit may end before it is told.
    assert all(each.startswith((error, "BuildTimeout: gave up")) for each in said), said
    assert any(each.startswith(error) for each in said), said
    assert compiler.compiles() == ["op.cpp"]
    assert max(when) - min(when) < LIMIT  # one after the other, it would be three times that


def test_threads_that_load_one_op_do_not_wait_for_its_hanging_compiler_in_turn(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.write(before="case \"$*\" in *' -c '*op.cpp*) sleep 600;; esac")
    monkeypatch.setenv("OPKILN_BUILD_TIMEOUT", str(LIMIT))
    path, told = source(tmp_path), []

    def load() -> None:
        try:
            opkiln.load("op", [str(path)], is_python_module=False, abi="none")
        except BuildTimeout as error:
            told.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(100)
    assert [error.what for error in told] == [told[0].what] * 3
    assert len(set(map(id, told))) == 3  # one traceback each
    assert compiler.compiles() == ["op.cpp"]


def test_a_compiler_that_answers_nothing_ends_all_who_need_it_at_once(
    tmp_path: Path, compiler: Compiler
) -> None:
    compiler.write(before=f"echo asked >> '{tmp_path}/asked'; sleep 600")
    began = time.monotonic()
    waiting = start(source(tmp_path), 4, OPKILN_BUILD_TIMEOUT=str(LIMIT))
    said, _ = ends(waiting)
    error = "ToolchainError: no C++ compiler can be used here"
    assert all(each.startswith((error, "BuildTimeout: gave up")) for each in said), said
    assert any(f"did not end within {LIMIT:g} s" in each for each in said), said
    assert time.monotonic() - began < 60, "a question had its own limit of 60 s"
    assert (tmp_path / "asked").read_text().split() == ["asked"]


def test_who_waits_for_the_list_of_compilers_says_so(tmp_path: Path, compiler: Compiler) -> None:
    gate = f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.05; done"
    compiler.write(before=f"touch '{tmp_path}/asked'; {gate}")
    (asking,) = start(source(tmp_path), 1)
    assert within(30, (tmp_path / "asked").exists)
    (waiter,) = start(tmp_path / "op.cpp", 1)
    assert waiter.stderr is not None
    line = waiter.stderr.readline()
    (tmp_path / "go").touch()
    assert line.startswith(f"op  waiting for pid {asking.pid} on host {os.uname().nodename}, ")
    assert line.endswith("(the list of compilers)\n")
    assert ends([asking, waiter])[0] == ["7", "7"]


def test_a_constructor_that_hangs_ends_all_who_wait_for_it_at_once(
    tmp_path: Path, compiler: Compiler
) -> None:
    hanging = "#include <unistd.h>\nstatic int hang = [] { for (;;) pause(); return 0; }();\n"
    waiting = start(source(tmp_path, hanging), 3, OPKILN_BUILD_TIMEOUT=str(LIMIT))
    said, when = ends(waiting)
    error = "BuildTimeout: op was built, but loading it took longer than 10 s"
    assert all(each.startswith((error, "BuildTimeout: gave up")) for each in said), said
    assert any(each.startswith(error) for each in said), said
    assert compiler.compiles() == ["op.cpp"]
    assert max(when) - min(when) < LIMIT


def test_a_stopped_builder_is_passed_by_one_of_those_who_wait(
    tmp_path: Path, compiler: Compiler
) -> None:
    gate = f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.05; done"
    compiler.write(before=f"case \"$*\" in *' -c '*op.cpp*) {gate};; esac")
    (builder,) = start(source(tmp_path), 1)
    try:
        assert within(30, compiler.compiles)
        os.kill(builder.pid, signal.SIGSTOP)
        waiting = start(tmp_path / "op.cpp", 3)
        assert within(60, lambda: len(compiler.compiles()) == 2), "nobody passed it"
        time.sleep(1)
        assert len(compiler.compiles()) == 2
        (tmp_path / "go").touch()
        assert ends(waiting)[0] == ["7"] * 3
        # The compiler looked for "go" in vain before it was there, so that compile runs again.
        assert len(compiler.compiles()) <= 3
    finally:
        os.kill(builder.pid, signal.SIGCONT)
    assert ends([builder])[0] == ["7"]


def test_who_waits_with_verbose_false_says_so_after_five_seconds(
    tmp_path: Path, compiler: Compiler
) -> None:
    gate = f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.05; done"
    compiler.write(before=f"case \"$*\" in *' -c '*op.cpp*) {gate};; esac")
    (builder,) = start(source(tmp_path), 1)
    assert within(30, compiler.compiles)
    (waiter,) = start(tmp_path / "op.cpp", 1)
    assert waiter.stderr is not None
    line = waiter.stderr.readline()
    (tmp_path / "go").touch()
    assert line.startswith(f"op  waiting for pid {builder.pid} on host {os.uname().nodename}, ")
    assert ends([builder, waiter])[0] == ["7", "7"]
