"""Under ccache and sccache the compiler may not run at all. What an object was made from is
observed all the same, and the cache serves what an empty cache would build."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample.op_tree import Tree

from opkiln.building.observing import limits
from opkiln.plan.plan import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# An object from the pool would not ask the launcher.
pytestmark = [pytest.mark.counts_compiles, pytest.mark.timed]

# 1, and 2 with -fshort-enums: the preprocessed text is the same.
ENUM = 'enum E { A }; extern "C" int answer() { return sizeof(E) == sizeof(int) ? 1 : 2; }\n'


def program(name: str) -> str:
    """A launcher on PATH, or from a package in this environment."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"there is no {name} here")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launcher:
    """A launcher with a cache and servers of its own."""

    def __init__(self, name: str, tree: Tree) -> None:
        self.name = name
        self.tree = tree
        self.path = program(name.partition(" ")[0])
        self.variables: dict[str, str] = {"HOME": str(tree.path / "home")}
        (tree.path / "home").mkdir(parents=True)
        getattr(self, "_" + name.partition(" ")[0])()
        tree.environment.update(self.variables)
        self.compile_with("g++")

    def compile_with(self, compiler: str) -> None:
        self.tree.environment["CXX"] = f"{self.path} {compiler}"
        if self.name == "ccache as g++":
            masked = self.tree.path / "masked/g++"
            masked.parent.mkdir(exist_ok=True)
            masked.unlink(missing_ok=True)
            masked.symlink_to(self.path)
            self.tree.environment["CXX"] = str(masked)

    def _ccache(self) -> None:
        self.variables["CCACHE_DIR"] = str(self.tree.path / "ccache")

    def _sccache(self) -> None:
        self.variables["SCCACHE_DIR"] = str(self.tree.path / "sccache")
        self.variables["SCCACHE_SERVER_PORT"] = str(free_port())
        self._run("--start-server")

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.path, *arguments], env={**os.environ, **self.variables}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout

    def work(self) -> str:
        """What the launcher says that it has done."""
        return self._run("--show-stats")

    def stop(self) -> None:
        if self.name == "sccache":
            self._run("--stop-server")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


LAUNCHERS = ["ccache", "ccache as g++", "sccache"]


@pytest.fixture
def launcher(request: pytest.FixtureRequest, tree: Tree) -> Iterator[Launcher]:
    made = Launcher(request.param, tree)
    yield made
    made.stop()


def small(tree: Tree, source: str, **files: str) -> None:
    tree.write("pkg/a.cpp", source.replace("@", str(tree.path)))
    for name, text in files.items():
        tree.write(name, text)
    tree.declare(sources=["a.cpp"], include_paths=[f"{tree.path}/later", f"{tree.path}/inc"])


def _file(name: str, text: str) -> Callable[[Tree], object]:
    return lambda tree: tree.write(name, text)


HEADER = '#include "n.h"\nextern "C" int answer() { return N; }\n'
ASKS = """
#define WANTED <maybe.h>
#if __has_include(WANTED)
#include WANTED
#else
#define N 1
#endif
extern "C" int answer() { return N; }
"""
INCBIN = """
asm(".section .rodata\\n.global data\\ndata: ." "incbin \\"@/data.bin\\"\\n.previous");
extern "C" const char data[] __attribute__((visibility("hidden")));
extern "C" int answer() { return data[0] - '0'; }
"""
CASES = {
    "a header": (HEADER, {"inc/n.h": "#define N 1\n"}, _file("inc/n.h", "#define N 2\n")),
    "a header in front of another": (
        HEADER, {"inc/n.h": "#define N 1\n"}, _file("later/n.h", "#define N 2\n"),
    ),
    "__has_include": (ASKS, {}, _file("inc/maybe.h", "#define N 2\n")),
    ".incbin": (INCBIN, {"data.bin": "1"}, _file("data.bin", "2")),
}  # fmt: skip


# What was read is found out by the same steps under each launcher; ccache and sccache are told it.
GRID = [
    pytest.param(
        launcher, name,
        marks=() if name == "a header" or (launcher, name) in (
            ("sccache", "a header in front of another"), ("ccache", "__has_include"),
            ("ccache", ".incbin"),
        ) else pytest.mark.full,
    )
    for launcher in LAUNCHERS
    for name in CASES
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "name"), GRID, indirect=["launcher"])
def test_a_change_is_noticed_under_a_launcher(launcher: Launcher, tree: Tree, name: str) -> None:
    source, files, change = CASES[name]
    small(tree, source, **files)
    assert tree.answer("first") == (1, "observed")
    assert tree.answer("warm") == (1, "observed")  # the launcher may have the object already
    if name == "a header":
        assert_it_did_its_work(launcher)
    change(tree)
    assert tree.answer("warm") == (2, "observed")


def assert_it_did_its_work(launcher: Launcher) -> None:
    """Otherwise the test above shows nothing."""
    done = launcher.work()
    if launcher.name.startswith("ccache"):
        # Under the name g++, it compiles the observer, too.
        hits = 1 if launcher.name == "ccache" else 2
        assert re.search(rf"Hits: +{hits} /", done), done
    else:
        assert re.search(r"Compile requests executed +2\n", done), done
        assert re.search(r"Cache hits +1\n", done), done


def explained(tree: Tree, cache: str) -> str:
    return tree.run(
        """
        from pkg.op import Builder
        from opkiln.loading.explain import explain
        print(explain(Builder().op()))
        """,
        cache,
    )


@pytest.mark.parametrize("launcher", ["ccache", "ccache as g++"], indirect=True)
def test_explain_says_that_a_launcher_is_used(launcher: Launcher, tree: Tree) -> None:
    small(tree, ENUM)
    assert re.search(rf"^launcher: +{re.escape(launcher.path)}$", explained(tree, "first"), re.M)


def test_explain_names_no_launcher_where_there_is_none(tree: Tree) -> None:
    small(tree, ENUM)
    assert "launcher:" not in explained(tree, "first")


def test_the_variables_of_a_launcher_reach_it(tree: Tree) -> None:
    """A second cache, on another machine, is filled from the storage that both share."""
    Launcher("ccache", tree)
    tree.environment["CCACHE_REMOTE_STORAGE"] = f"file:{tree.path}/shared"
    small(tree, ENUM)
    for cache in ("first", "second"):
        tree.environment["CCACHE_DIR"] = str(tree.path / f"ccache-{cache}")
        assert tree.answer(cache) == (1, "observed")
    done = subprocess.run(
        [program("ccache"), "--print-stats"], capture_output=True, text=True, check=True,
        env={**os.environ, "CCACHE_DIR": str(tree.path / "ccache-second")},
    )  # fmt: skip
    assert "remote_storage_hit\t1" in done.stdout, done.stdout


def test_variables_that_name_another_compiler_do_not_reach_a_launcher(tree: Tree) -> None:
    Launcher("ccache", tree)
    other = tree.write("bin/other", '#!/bin/sh\nexec g++ -fshort-enums "$@"\n', mode=0o755)
    tree.environment["CCACHE_COMPILER"] = str(other)
    small(tree, ENUM)
    assert tree.answer("first") == (1, "observed")
    assert "kept away from compilers: CCACHE_COMPILER" in explained(tree, "first")


def test_options_that_ccache_is_told_to_ignore_still_count(tree: Tree) -> None:
    Launcher("ccache", tree)
    tree.environment["CCACHE_IGNOREOPTIONS"] = "-f*short-enums"
    small(tree, ENUM)
    for value, flag in ((1, "-fno-short-enums"), (2, "-fshort-enums")):
        tree.environment["CXXFLAGS"] = flag
        assert tree.answer("warm") == (value, "observed")


REFUSED = {
    "in front": "CXX={program} g++",
    "under the name of g++": "CXX={tree}/masked/g++",
    "under the name of g++ on PATH": "PATH={tree}/masked:/usr/bin:/bin",
}


@pytest.mark.parametrize("name", ["distcc", "icecc"])
@pytest.mark.parametrize("how", REFUSED)
def test_a_launcher_that_compiles_on_other_hosts_is_refused(
    tree: Tree, name: str, how: str
) -> None:
    path = tree.write(f"bin/{name}", '#!/bin/sh\nexec "$@"\n', mode=0o755)
    (tree.path / "masked").mkdir()
    for each in ("g++", "clang++", "c++"):
        (tree.path / "masked" / each).symlink_to(path)
    variable, _, value = REFUSED[how].format(program=path, tree=tree.path).partition("=")
    tree.environment[variable] = value
    small(tree, ENUM)
    with pytest.raises(AssertionError) as refused:
        tree.answer("first")
    assert "no C++ compiler can be used here" in str(refused.value)
    assert f"{name} compiles on other hosts" in str(refused.value)


def test_a_script_that_starts_a_remote_launcher_is_refused(tree: Tree) -> None:
    path = tree.write("bin/distcc", '#!/bin/sh\nexec "$@"\n', mode=0o755)
    script = tree.write("bin/compile", f'#!/bin/sh\nexec {path} g++ "$@"\n', mode=0o755)
    tree.environment["CXX"] = str(script)
    small(tree, ENUM)
    with pytest.raises(AssertionError) as refused:
        tree.answer("first")
    assert f"a.cpp is refused: compile started {path}" in str(refused.value)


def test_ccache_starts_no_prefix_command(tree: Tree) -> None:
    launcher = Launcher("ccache", tree)
    path = tree.write("bin/distcc", '#!/bin/sh\nexec "$@"\n', mode=0o755)
    settings = Path(launcher.variables["CCACHE_DIR"]) / "ccache.conf"
    settings.parent.mkdir()
    settings.write_text(f"prefix_command = {path}\n")
    tree.environment["CCACHE_PREFIX"] = str(path)
    small(tree, ENUM)
    assert tree.answer("first") == (1, "observed")


def test_a_compile_that_another_program_starts_is_observed(tree: Tree) -> None:
    tree.environment["CXX"] = "nice g++"
    small(tree, HEADER, **{"inc/n.h": "#define N 1\n"})
    assert tree.answer("warm") == (1, "observed")
    tree.write("inc/n.h", "#define N 2\n")
    assert tree.answer("warm") == (2, "observed")


def test_an_object_that_no_compiler_was_seen_to_write_is_not_kept(tree: Tree) -> None:
    """As of a launcher that is not known, and has it compiled elsewhere."""
    small(tree, ENUM)
    ready = tree.path / "ready.o"
    tree.compile("pkg/a.cpp", str(ready), "-c", "-fPIC")
    text = f'#!{sys.executable}\nimport shutil, sys\nshutil.copy("{ready}", sys.argv[-1])\n'
    path = tree.write("bin/elsewhere", text, mode=0o755)
    tree.environment["CXX"] = f"{path} g++"
    value, inputs = tree.answer("first")
    assert value == 1
    assert inputs != "observed"


def _switched(tree: Tree, value: int) -> None:
    """The compiler that a script leads to makes other code of the same preprocessed text."""
    tree.write("real", f"{tree.path}/bin/g++-{value}")


@pytest.mark.parametrize(
    "launcher",
    ["ccache", pytest.param("sccache", marks=pytest.mark.full)],
    indirect=True,
)
def test_another_compiler_behind_a_script_is_noticed(launcher: Launcher, tree: Tree) -> None:
    tree.write("bin/g++", f'#!/bin/sh\nexec "$(cat {tree.path}/real)" "$@"\n', mode=0o755)
    for value, flag in ((1, "-fno-short-enums"), (2, "-fshort-enums")):
        tree.write(f"bin/g++-{value}", f'#!/bin/sh\nexec g++ {flag} "$@"\n', mode=0o755)
    launcher.compile_with(str(tree.path / "bin/g++"))
    small(tree, ENUM)
    for value in (1, 2):
        _switched(tree, value)
        assert tree.answer("warm") == (value, "observed")


CHOOSERS = ["ccache as g++", "a script"]


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_another_compiler_on_path_is_noticed(chooser: str, tree: Tree) -> None:
    """ccache as g++, and a script that starts g++, take the first real one on PATH."""
    for value, flag in ((1, "-fno-short-enums"), (2, "-fshort-enums")):
        script = f'#!/bin/sh\nexec {shutil.which("g++")} {flag} "$@"\n'
        tree.write(f"{value}/g++", script, mode=0o755)
    if chooser == "a script":
        script = tree.write("bin/chosen", '#!/bin/sh\nexec g++ "$@"\n', mode=0o755)
        tree.environment["CXX"] = str(script)
    else:
        Launcher(chooser, tree)
    small(tree, ENUM)
    for value in (1, 2):
        tree.environment["PATH"] = f"{tree.path}/{value}:{os.environ['PATH']}"
        assert tree.answer("warm") == (value, "observed")


def test_a_compiler_that_ccaches_settings_name_is_noticed(tree: Tree) -> None:
    launcher = Launcher("ccache as g++", tree)
    for value, flag in ((1, "-fno-short-enums"), (2, "-fshort-enums")):
        script = f'#!/bin/sh\nexec {shutil.which("g++")} {flag} "$@"\n'
        tree.write(f"{value}/g++", script, mode=0o755)
    small(tree, ENUM)
    settings = Path(launcher.variables["CCACHE_DIR"]) / "ccache.conf"
    settings.parent.mkdir()
    for value in (1, 2):
        settings.write_text(f"compiler = {tree.path}/{value}/g++\n")
        assert tree.answer("warm") == (value, "observed")


def test_a_script_that_starts_a_launcher_is_found_out(tree: Tree) -> None:
    launcher = Launcher("ccache", tree)
    script = tree.write("bin/g++", f'#!/bin/sh\nexec {launcher.path} g++ "$@"\n', mode=0o755)
    tree.environment["CXX"] = str(script)
    small(tree, HEADER, **{"inc/n.h": "#define N 1\n"})
    for cache in ("first", "warm"):
        assert tree.answer(cache) == (1, "observed")
    tree.write("inc/n.h", "#define N 2\n")
    assert tree.answer("warm") == (2, "observed")


TEXTS = {
    'asm(".incbin \\"f\\"");': True,
    'asm("." "incbin \\"f\\"");': True,
    'asm(".include \\"f\\"");': True,
    'asm("." "include \\"f\\"");': True,
    'asm(".macro m\\n");': True,
    'int include(int x); asm("nop");': False,
    'const char* text = "include <x>";': False,
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_has_the_assembler_read_a_file_is_recognised(text: str) -> None:
    command = Command(("g++", "-O3"), "/x.cpp", "/x.o")
    assert limits.reads_more(text.encode(), command) == TEXTS[text]


FLAGS = {
    "-fprofile-use=f": True,
    "-fnew-thing=list=/f": True,
    "--new-thing=/f": True,
    "-Xclang": True,
    "-ffile-prefix-map=/a=/b": False,
    "-I/a": False,
    "-DX=/a": False,
    "-march=x": False,
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_may_have_the_compiler_read_a_file_are_recognised(flag: str) -> None:
    command = Command(("/usr/bin/g++", flag), "/x.cpp", "/x.o")
    assert limits.reads_more(b"int x;", command) == FLAGS[flag]
