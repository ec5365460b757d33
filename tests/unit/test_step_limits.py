"""What the programs of a step may start and write, by logs of the observer."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from opkiln.building.observing import limits, log
from opkiln.machine.toolchain import find
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STAGE = "/stage"


class Machine:
    """Programs in directories: compilers in one installation, other programs beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.host = self.program("gcc/bin/g++")
        self.cc1plus = self.program("gcc/lib/gcc/12/cc1plus")
        self.nvcc = self.program("cuda/bin/nvcc")
        self.program("cuda/lib64/libcudart.so")
        self.assembler = self.program("bin/as")
        self.touch = self.program("bin/touch")
        self.ccache = self.program("bin/ccache")
        self.evil = self.program("evil/as")
        self.shell = str(os.path.realpath("/bin/sh"))

    def program(self, name: str, text: str = "binary") -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    def judge(
        self, first: str, *records: str, launcher: str = "", stage: str = STAGE
    ) -> limits.Conduct:
        """``records`` follow that of the first program, which is process 1."""
        device = SimpleNamespace(
            family="nvcc", path=self.nvcc, host=None if first == self.nvcc else first
        )
        tools: Any = SimpleNamespace(cxx=self.host, launcher=launcher, tools=(), device=device)
        began = f"B 1 0 0 0 0.0 {self.shell if find.has_interpreter(first) else first}"
        parsed = log.parse(b"".join(each.encode() + b"\0" for each in (began, *records)))
        return limits.Conduct(parsed, first, tools, stage)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    with override(path=(str(made.root / "bin"),)):
        yield made


def start(program: str, *, process: int = 2, parent: int = 1, asked_for: str = "") -> list[str]:
    return [f"S {process} {process} {parent} 0 0.0 {asked_for or program}",
            f"B {process} {parent} {parent} 0 0.0 {program}"]  # fmt: skip


def write(path: str, *, process: int = 1, parent: int = 0) -> str:
    return f"W {process} 0 {parent} 0 0.0 {path}"


def test_a_compiler_may_start_its_own_programs_and_assemblers_on_path(here: Machine) -> None:
    found = here.judge(here.host, *start(here.cc1plus), *start(here.assembler, process=3))
    assert found.stray() is None
    assert found.complete


@pytest.mark.parametrize("name", ["touch", "evil"])
def test_a_compiler_may_start_no_other_program(here: Machine, name: str) -> None:
    program = getattr(here, name)
    found = here.judge(here.host, *start(program)).stray()
    assert found == limits.Stray(program, here.host, written=False)


def test_a_program_that_said_nothing_is_judged_by_its_name(here: Machine) -> None:
    found = here.judge(here.host, f"S 2 2 1 0 0.0 {here.evil}")
    assert found.stray() == limits.Stray(here.evil, here.host, written=False)
    assert not found.complete


def test_a_program_that_hides_behind_a_real_one_is_judged(here: Machine) -> None:
    found = here.judge(here.host, *start(here.assembler, asked_for=here.evil))
    assert found.stray() == limits.Stray(here.evil, here.host, written=False)
    assert not found.complete


def test_only_a_device_compiler_may_start_a_shell(here: Machine) -> None:
    shell = start(here.shell)
    assert here.judge(here.nvcc, *shell).stray() is None
    assert here.judge(here.host, *shell).stray() is not None
    more = start(here.touch, process=3, parent=2)
    assert here.judge(here.nvcc, *shell, *more).stray() is not None


def test_the_users_script_may_start_and_write_anything(here: Machine) -> None:
    script = here.program("own/g++", "#!/bin/sh\n")
    tool = [*start(here.touch), write("/elsewhere", process=2)]
    found = here.judge(script, write("/log"), *tool)
    assert found.stray() is None


def test_a_compiler_behind_a_script_is_held_to_the_limits(here: Machine) -> None:
    script = here.program("own/g++", "#!/bin/sh\n")
    compiler = start(here.host)
    more = start(here.evil, process=3, parent=2)
    assert here.judge(script, *compiler, *more).stray() is not None
    assert here.judge(script, *compiler, write("/elsewhere", process=2)).stray() is not None


def test_a_compiler_writes_into_its_directory_and_to_devices(here: Machine) -> None:
    inside = [
        write(path)
        for path in (
            f"{STAGE}/a.o",
            "/dev/null",
            "/proc/self/comm",
            "/dev/nvidiactl",
            "/dev/nvidia0",
            "/dev/dri/renderD128",
        )
    ]
    assert here.judge(here.host, *inside).stray() is None
    for path in ("/stage2/a.o", f"{STAGE}/../a.o", "/home/a.o", "/dev/shm/a.o"):
        found = here.judge(here.host, write(path)).stray()
        assert found == limits.Stray(path, here.host, written=True)


def test_a_compiler_may_write_where_its_launcher_writes(here: Machine) -> None:
    launched = [write("/cache/tmp/a"), *start(here.host), write("/cache/tmp/b", process=2)]
    found = here.judge(here.ccache, *launched)
    assert found.launched
    assert found.stray() is None
    assert here.judge(here.ccache, *launched, write("/other/b", process=2)).stray() is not None


def test_a_launcher_of_any_name_may_write_if_the_user_named_it(here: Machine) -> None:
    own = here.program("bin/site-cache")
    assert here.judge(own, write("/cache/a"), launcher=own).stray() is None
    assert here.judge(own, write("/cache/a")).stray() is not None


def test_a_link_in_the_staging_directory_leads_out_of_it(here: Machine) -> None:
    stage = here.root / "stage"
    stage.mkdir()
    (stage / "src").symlink_to(here.root / "gcc")
    assert here.judge(here.host, write(f"{stage}/a.o"), stage=str(stage)).stray() is None
    assert here.judge(here.host, write(f"{stage}/src/a.o"), stage=str(stage)).stray() is not None


def test_what_a_script_looks_up_on_path_is_told(here: Machine) -> None:
    script = here.program("own/g++", "#!/bin/sh\n")
    first, second = here.program("first/cc"), here.program("second/cc")
    with override(path=(str(here.root / "first"), str(here.root / "second"))):
        found = here.judge(script, *start(second))
        assert list(found.chosen()) == [("cc", (first, second))]
        assert not list(here.judge(here.host, *start(second)).chosen())


def test_who_wrote_a_file_last_decides_whether_a_launcher_handed_it_out(here: Machine) -> None:
    compiled = [*start(here.host), write(f"{STAGE}/a.o", process=2)]
    assert here.judge(here.ccache, *compiled).made(f"{STAGE}/a.o")
    assert not here.judge(here.ccache, *compiled, write(f"{STAGE}/a.o")).made(f"{STAGE}/a.o")
    assert not here.judge(here.ccache).made(f"{STAGE}/a.o")
