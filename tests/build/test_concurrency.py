"""Many processes, threads and forks at once: one compile, no hang, nothing wrong."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sample import child
from sample.compiler import Compiler
from sample.package import rest
from sample.quiet import within

import opkiln

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package, Steps


pytestmark = pytest.mark.timed


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def loader(package: Package, **environment: str) -> subprocess.Popen[str]:
    code = "from {0}.op import PlainBuilder; print(PlainBuilder().load(verbose=False).add(1, 2))"
    return child.start(code.format(package.name), path=[package.where], env=environment)


def ended(children: list[subprocess.Popen[str]]) -> list[str]:
    done = [child.finish(each) for each in children]
    assert [each.returncode for each in done] == [0] * len(done), done[0].stderr
    return [each.stdout.strip() for each in done]


def test_eight_processes_on_a_cold_cache_compile_each_object_once(
    plain: Package, compiler: Compiler
) -> None:
    rest()
    assert ended([loader(plain) for _ in range(8)]) == ["103"] * 8
    assert sorted(compiler.compiles()) == ["add.cpp", "scale.cpp", "where.cpp"]


def test_same_name_with_other_flags_at_the_same_time_gives_each_its_own(
    tmp_path: Path, compiler: Compiler
) -> None:
    source = tmp_path / "who.cpp"
    source.write_text('extern "C" int who() { return WHO; }\n')
    rest()
    code = """
        import sys, opkiln
        library = opkiln.load("who", [sys.argv[1]], extra_cflags=["-DWHO=" + sys.argv[2]],
                              is_python_module=False, abi="none")
        print(library.who())
    """
    numbers = [str(i % 2) for i in range(4)]
    children = [child.start(code, str(source), number) for number in numbers]
    assert ended(children) == numbers
    assert compiler.compiles() == ["who.cpp"] * 2


def test_a_killed_builder_does_not_block_the_next_one(
    plain: Package, compiler: Compiler, tmp_path: Path
) -> None:
    compiler.write(before=f"[ -e '{tmp_path}/go' ] || case \"$*\" in *' -c '*) sleep 600;; esac")
    builder = loader(plain)
    try:
        assert within(30, compiler.compiles), "it never began to compile"
        waiter = loader(plain)
        time.sleep(0.3)
        assert waiter.poll() is None
    finally:
        os.kill(builder.pid, signal.SIGKILL)
        builder.communicate()
    (tmp_path / "go").touch()
    assert ended([waiter]) == ["103"]
    assert ended([loader(plain)]) == ["103"]


def test_a_killed_builder_leaves_no_compiler_and_no_half_entry(
    plain: Package, compiler: Compiler, tmp_path: Path, cache: Path
) -> None:
    compiler.write(before="case \"$*\" in *' -c '*) sleep 600;; esac")
    builder = loader(plain, TMPDIR=str(tmp_path))
    assert within(30, compiler.compiles)
    os.kill(builder.pid, signal.SIGKILL)
    builder.communicate()

    def survivors() -> list[str]:
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/cmdline", "rb") as file:
                        line = file.read()
                except OSError:
                    continue
                if os.fsencode(compiler.path) in line:
                    found.append(name)
        return found

    assert within(10, lambda: not survivors())
    assert within(10, lambda: not list(tmp_path.glob("opkiln-*"))), "scratch is left behind"
    assert list(cache.glob("v1/ops/*/*/*/*/*")) == []


def test_who_waits_says_for_whom(plain: Package, compiler: Compiler, tmp_path: Path) -> None:
    gate = f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.05; done"
    compiler.write(before=f"case \"$*\" in *' -c '*) {gate};; esac")
    builder = loader(plain)
    assert within(30, compiler.compiles)
    waiter = child.start(f"""
        from opkiln.run import events
        from {plain.name}.op import PlainBuilder
        def tell(event):
            if event.kind == "waiting" and event.data["what"] == "build":
                print("waiting for", event.data["pid"], event.data["host"], flush=True)
        with events.listen(tell):
            PlainBuilder().load(verbose=False)
    """, path=[plain.where])  # fmt: skip
    assert waiter.stdout is not None
    ready, _, _ = select.select([waiter.stdout], [], [], 30)
    assert ready, "it never said that it waits"
    said = waiter.stdout.readline().split()
    (tmp_path / "go").touch()
    assert said == ["waiting", "for", str(builder.pid), os.uname().nodename]
    assert ended([builder]) == ["103"]
    assert child.finish(waiter).returncode == 0


def test_eight_threads_that_load_at_once_build_once_and_get_the_same(
    plain: Package, steps: Steps
) -> None:
    rest()
    got: list[Any] = []
    start = threading.Barrier(8)

    def load() -> None:
        start.wait()
        got.append(plain.builder().load())

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 8
    assert len({id(library) for library in got}) == 1
    assert len(steps.compiled) == 3
    assert steps.linked == 1


def test_threads_that_load_different_ops_get_each_its_own(tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"op{i}.cpp").write_text(f'extern "C" int f() {{ return {i}; }}\n')
    got: dict[int, int] = {}

    def load(i: int) -> None:
        library = opkiln.load(f"thread_op{i}", [str(tmp_path / f"op{i}.cpp")], abi="none",
                              is_python_module=False)  # fmt: skip
        got[i] = library.f()

    threads = [threading.Thread(target=load, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_forked_child_uses_what_its_parent_loaded_and_loads_more(
    plain: Package, package: Callable[..., Package]
) -> None:
    library, another = plain.load(), package("plain")
    pid = os.fork()
    if pid == 0:
        good = library.add(1, 2) == 103 and plain.builder().load() is library
        good = good and another.load().add(1, 2) == 103  # builds, in the child
        os._exit(0 if good else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert another.load().add(1, 2) == 103


def test_a_fork_during_another_threads_build_does_not_hang_the_child(
    plain: Package, package: Callable[..., Package], compiler: Compiler, tmp_path: Path
) -> None:
    other = package("plain")
    other.load()
    gate = f"[ -e '{tmp_path}/go' ] || case \"$*\" in *' -c '*) sleep 0.5;; esac"
    compiler.write(before=gate)
    before = len(compiler.compiles())
    thread = threading.Thread(target=plain.load)
    thread.start()
    assert within(30, lambda: len(compiler.compiles()) > before)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        (tmp_path / "go").touch()
        os._exit(0 if plain.load().add(1, 2) == 103 else 1)
    _, status = os.waitpid(pid, 0)
    thread.join(60)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not thread.is_alive()


def test_spawned_workers_load_it(plain: Package, tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(
        "import multiprocessing as mp\n"
        f"from {plain.name}.op import PlainBuilder\n"
        "def work(i):\n    return PlainBuilder().load(verbose=False).add(i, 0)\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(3) as pool:\n"
        "        print(sorted(pool.map(work, range(6))))\n"
    )
    out = child.run(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
                    path=[plain.where])  # fmt: skip
    assert out.strip() == str([100 + i for i in range(6)])


def test_a_header_edited_between_two_compiles_has_both_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "number.h"
    header.write_text("#define NUMBER 1\n")
    first = tmp_path / "a_first.cpp"
    first.write_text('#include "number.h"\nextern "C" int first() { return NUMBER; }\n')
    second = tmp_path / "b_second.cpp"
    second.write_text(
        '#include "number.h"\nextern "C" int first();\n'
        'extern "C" int value() { return first() * 10 + NUMBER; }\n'
    )
    # A compiler whose first compile of the second file finds the header edited, a while after the
    # first file was compiled and kept.
    editing = tmp_path / "g++"
    editing.write_text(
        f"#!/bin/sh\n# {secrets.token_hex(8)}: another compiler in each run, for the pool\n"
        f'case "$*" in *" -c "*b_second*) if mkdir {tmp_path}/edited 2>/dev/null; then\n'
        f"sleep 0.1; echo '#define NUMBER 2' > {header}; sleep 0.1; fi;; esac\n"
        'exec /usr/bin/g++ "$@"\n'
    )
    editing.chmod(0o755)
    monkeypatch.setenv("CXX", str(editing))
    monkeypatch.setenv("MAX_JOBS", "1")
    sources = [str(first), str(second)]
    library = opkiln.load("edited", sources, abi="none", is_python_module=False)
    assert (tmp_path / "edited").is_dir()
    assert library.value() == 22
