"""Processes that wait for a build: each has a limit, and time-outs do not add up."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.compiler import Compiler
from sample.quiet import within

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

LIMIT = 8.0
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
    assert all(each.startswith("BuildTimeout: ") for each in said), said
    assert all(f"{compiler.path} ran longer than {LIMIT:g} s" in each for each in said), said
    assert compiler.compiles() == ["op.cpp"]
    assert max(when) - min(when) < LIMIT  # one after the other, it would be three times that


def test_a_constructor_that_hangs_ends_all_who_wait_for_it_at_once(
    tmp_path: Path, compiler: Compiler
) -> None:
    hanging = "#include <unistd.h>\nstatic int hang = [] { for (;;) pause(); return 0; }();\n"
    waiting = start(source(tmp_path, hanging), 3, OPKILN_BUILD_TIMEOUT=str(LIMIT))
    said, when = ends(waiting)
    assert all("op was built, but loading it took longer than 8 s" in each for each in said), said
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
        (tmp_path / "go").touch()
        assert ends(waiting)[0] == ["7"] * 3
        assert len(compiler.compiles()) == 2
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
