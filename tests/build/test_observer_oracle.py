"""What the kernel sees of a step, and the preloaded observer does not, is a hole in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sample import levels, watching
from sample.watching import LIST, Seen, Unavailable

from opkiln.building import gather, observed
from opkiln.building.observing import log, observer
from opkiln.machine.binary import elf
from opkiln.machine.facts import ABSENT, LISTING, split_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# What the C library reads for itself. docs/reliability.md says that these are not inputs.
OF_THE_C_LIBRARY = ("/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/localtime",
                    "/usr/share/zoneinfo/", "/usr/lib/locale/", "/usr/share/locale/")  # fmt: skip


class Run(NamedTuple):
    """A command that ran, as the kernel and the observer saw it."""

    seen: list[Seen]
    observation: log.Observation
    gap: str  # why the observer's log does not count
    unknown: list[Seen]  # what the kernel saw, and no input follows from


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("observer") / "observer")
    flags = ("-x", "c", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run(["g++", *flags, "-o", path, observer._SOURCE, "-ldl"], check=True)
    return path


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that looks at a path in any of the ways that the C library has."""
    path = str(tmp_path_factory.mktemp("ways") / "ways")
    source = Path(__file__).parent.parent / "sample" / "ways.c"
    subprocess.run(["gcc", "-w", "-O1", "-o", path, source, "-ldl"], check=True)
    return path


def run(library: str, argv: list[str], cwd: Path, **variables: str) -> Run:
    first = shutil.which(argv[0])
    assert first is not None
    stage = cwd / "stage"
    stage.mkdir(exist_ok=True)
    kept = str(stage / "log")
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", **variables}
    try:
        seen = watching.watch([first, *argv[1:]], env | observer.environment(library, kept), cwd)
    except Unavailable as error:
        pytest.skip(str(error))
    observation = log.finish(kept)
    assert observation is not None
    loaded = observed._read_loaded(observation, ())
    searched = observed._searched_directories(observation, loaded)
    called = (first, *observation.called)
    found = gather.list_inputs(observation, str(stage), called, searched=searched)
    own = (f"{library}/", f"{stage}/", f"{elf.LIST}/")
    others = [each for each in dict.fromkeys(seen) if not f"{each.path}/".startswith(own)]
    known = Known(observation, found)
    unknown = [each for each in others if not known.has(each)]
    gap = "" if observation.complete else "not complete"
    gap = gap or next((path for path, each in loaded.items() if each is None or each.opaque), "")
    return Run(seen, observation, gap, unknown)


class Known:
    """What follows from what was seen: something would not stay the same if the answer to one of
    these looks were another one."""

    def __init__(self, observation: log.Observation, found: gather.Inputs) -> None:
        self.made = {*observation.written, *map(os.path.normpath, observation.made)}
        self.paths = {os.path.normpath(each) for _, each, what in found.facts if not what}
        absent = {os.path.normpath(os.path.join(directory, name))
                  for kind, directory, what in found.facts if kind == ABSENT
                  for name in split_names(what)}  # fmt: skip
        # Links that lead nowhere are followed again.
        self.absent = absent | {*map(os.path.realpath, absent)}
        self.listed = {os.path.realpath(each) for kind, each, _ in found.facts if kind == LISTING}
        # Programs on PATH are compared by their names; a path through what does not exist, once.
        self.names = {each.asked_for for each in observation.started}
        self.above = {each for path in self.paths | self.absent for each in _above(path)}
        self.real = {*map(os.path.realpath, self.paths)}

    def has(self, seen: Seen) -> bool:
        path = seen.path
        if seen.is_now == "device" or seen.writes:
            return True
        if f"{path}/".startswith(("/proc/", "/sys/", "/dev/", *OF_THE_C_LIBRARY)):
            return True
        real, plain = os.path.realpath(path), os.path.normpath(path)
        if self.made & {path, plain}:
            return True
        if seen.does == LIST:
            return real in self.listed
        if seen.is_now == "nothing":
            return os.path.basename(path) in self.names or any(
                each == plain or each.startswith(plain + "/") or plain.startswith(each + "/")
                for each in self.absent
            )
        return plain in self.paths | self.absent | self.above or real in self.real


def _above(path: str) -> Iterator[str]:
    while path not in ("", "/"):
        path = os.path.dirname(path)
        yield path


def _tell(seen: Iterable[Seen]) -> str:
    return "\n".join(f"{each.does} {each.path} ({each.is_now})" for each in seen)


SOURCE = "#include <vector>\nint f(int x) { return std::vector<int>(x).size(); }\n"
COMPILE = ["-c", "a.cpp", "-o", "stage/a.o"]


# Full: those are a g++ and a clang++ again.
COMPILERS = [
    "g++", "clang++",
    *(pytest.param(name, marks=pytest.mark.full) for name in (levels.OTHER_CXX, "hipcc")),
]  # fmt: skip


@pytest.mark.parametrize("compiler", COMPILERS)
def test_all_that_a_compile_and_a_link_ask_for_is_an_input(
    compiler: str, library: str, tmp_path: Path
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    (tmp_path / "a.cpp").write_text(SOURCE)
    for argv in (
        [compiler, "-fPIC", *COMPILE],
        [compiler, "-shared", "stage/a.o", "-o", "stage/a.so"],
    ):
        done = run(library, argv, tmp_path, HOME=str(tmp_path))
        assert not done.gap
        assert len(done.seen) > 50
        assert not done.unknown, _tell(done.unknown)


SCRIPTS = {
    "sh": """
        if [ -e settings ] || [ -x tool ] || [ -d extra ]; then :; fi
        for each in include/*.h; do . ./$each; done
        cd nowhere 2>/dev/null || true
        exec g++ -c a.cpp -o stage/a.o
    """,
    "bash": """
        shopt -s nullglob
        [[ -f settings && -L link ]] || true
        for each in include/*; do read -r line <$each; done
        type -p some-tool || true
        g++ -c a.cpp -o stage/a.o $(cat flags 2>/dev/null)
    """,
    "python": """
        import glob, os, pathlib, shutil, subprocess
        os.listdir("include"), glob.glob("inc*/*.h"), os.path.realpath("link"), os.readlink("link")
        os.path.exists("settings"), shutil.which("some-tool"), list(os.walk("include"))
        pathlib.Path("include/a.h").read_text(), os.path.samefile("link", "include/a.h")
        os.execvp("g++", ["g++", "-c", "a.cpp", "-o", "stage/a.o"])
    """,
}  # fmt: skip


@pytest.mark.parametrize("kind", SCRIPTS)
def test_all_that_a_script_in_front_of_a_compiler_asks_for_is_an_input(
    kind: str, library: str, tmp_path: Path
) -> None:
    (tmp_path / "a.cpp").write_text("int f() { return 1; }\n")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "a.h").write_text("\n")
    (tmp_path / "link").symlink_to("include/a.h")
    script = tmp_path / "script"
    script.write_text(textwrap.dedent(SCRIPTS[kind]))
    program = {"python": os.path.realpath(sys.executable)}.get(kind, kind)
    done = run(library, [program, str(script)], tmp_path)
    assert not done.gap
    assert not done.unknown, _tell(done.unknown)


WAYS = range(68)
COUNTED = range(54, 68)  # by the numbers of system calls, which are told as the functions are


def test_no_way_of_the_c_library_is_left_out(ways: str, tmp_path: Path) -> None:
    last = [
        subprocess.run([ways, str(n), "/"], check=False).returncode
        for n in (WAYS[-1], WAYS[-1] + 1)
    ]
    assert last == [0, 3]


NAMES = ("file", "directory", "link", "broken", "none", "none/below", "directory/inside")


@pytest.mark.parametrize("way", WAYS)
def test_however_a_path_is_looked_at_it_is_an_input_or_the_log_has_a_gap(
    way: int, ways: str, library: str, tmp_path: Path
) -> None:
    paths = []
    for number, name in enumerate(NAMES):  # each in its own place: no look is that of another
        place = tmp_path / str(number)
        (place / "directory").mkdir(parents=True)
        (place / "file").write_text("#!/bin/sh\n")
        (place / "directory" / "inside").write_text("")
        (place / "link").symlink_to("file")
        (place / "broken").symlink_to("none")
        paths.append(str(place / name))
    done = run(library, [ways, str(way), *paths], tmp_path)
    assert not (done.gap and way in COUNTED), done.gap
    if not done.gap:
        assert not done.unknown, _tell(done.unknown)
        return
    for path in paths:  # the gap of one excuses no other
        done = run(library, [ways, str(way), path], tmp_path)
        assert done.gap or not done.unknown, f"{path}:\n{_tell(done.unknown)}"
