"""Processes that wait for a build: each has a limit, and time-outs do not add up."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child, known
from sample.compiler import Compiler
from sample.quiet import within

import opkiln
from opkiln.errors import BuildTimeout

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = pytest.mark.timed

LIMIT = 5.0
COMPILE_HANGS = "case \"$*\" in *' -c '*op.cpp*) sleep 600;; esac"
LOAD = """
    import sys, time, opkiln
    from opkiln import errors
    from opkiln.run import progress
    from opkiln.store import lock
    progress._FIRST_QUIET_LINE, lock._PASSED_AFTER = 0.2, 0.5  # seconds, both 5
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


class Hanging:
    """Processes that load an op, all with the same limit, and the compiler that they use."""

    def __init__(self, place: Path, count: int, before: str = "", text: str = "") -> None:
        self.compiler = Compiler(place)
        self.compiler.write(before=before)
        self.asked = place / "asked"
        variables = {
            "CXX": str(self.compiler.path), "OPKILN_BUILD_TIMEOUT": str(LIMIT),
            "OPKILN_CACHE_DIR": str(known.make_store(place / "cache")),
            "OPKILN_RUNTIME_DIR": str(place / "run"),
        }  # fmt: skip
        self.children = start(source(place, text), count, **variables)
        # The next ones are not started beside these.
        assert within(60, lambda: self.compiler.compiles() or self.asked.exists())

    def ends(self, error: str, count: int) -> tuple[list[str], list[float]]:
        said, when = ends(self.children)
        # On a busy machine, a waiter's own limit may end before it is told.
        assert all(each.startswith((error, "BuildTimeout: gave up")) for each in said), said
        assert any(each.startswith(error) for each in said), said
        assert self.compiler.compiles() == ["op.cpp"] * count
        return said, when


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Hanging]]:
    """They hang at the same time, so that the limit passes once."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("compile", "question", "load")}
    asked = f"echo asked >> '{places['question']}/asked'; sleep 600"
    pause = "#include <unistd.h>\nstatic int hang = [] { for (;;) pause(); return 0; }();\n"
    made = {
        "compile": Hanging(places["compile"], 4, COMPILE_HANGS),
        "question": Hanging(places["question"], 4, asked),
        "load": Hanging(places["load"], 3, text=pause),
    }
    yield made
    for each in [each for one in made.values() for each in one.children if each.poll() is None]:
        each.kill()
        each.communicate()


@pytest.mark.usefixtures("hanging")  # their limit passes at the same time
def test_threads_that_load_one_op_do_not_wait_for_its_hanging_compiler_in_turn(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.write(before=COMPILE_HANGS)
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


def test_a_time_out_of_the_compiler_ends_all_who_wait_for_it_at_once(
    hanging: dict[str, Hanging],
) -> None:
    path = hanging["compile"].compiler.path
    error = f"BuildTimeout: {path} was killed, because it did not end within {LIMIT:g} s"
    _, when = hanging["compile"].ends(error, 1)
    assert max(when) - min(when) < LIMIT  # one after the other, it would be three times that


def test_a_compiler_that_answers_nothing_ends_all_who_need_it_at_once(
    hanging: dict[str, Hanging],
) -> None:
    said, when = hanging["question"].ends("ToolchainError: no C++ compiler can be used here", 0)
    assert any(f"did not end within {LIMIT:g} s" in each for each in said), said
    assert max(when) - min(when) < LIMIT
    assert hanging["question"].asked.read_text().split() == ["asked"]


def test_a_constructor_that_hangs_ends_all_who_wait_for_it_at_once(
    hanging: dict[str, Hanging],
) -> None:
    error = f"BuildTimeout: op was built, but loading it took longer than {LIMIT:g} s"
    _, when = hanging["load"].ends(error, 1)
    assert max(when) - min(when) < LIMIT


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


def test_who_waits_with_verbose_false_says_so_after_a_while(
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
