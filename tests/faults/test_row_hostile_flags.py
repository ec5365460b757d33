"""Row 21: whatever the flags say, only the toolchain's programs are started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, returning, write
from sample.levels import IS_X86
from sample.tracing import calls, strace

from opkiln.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.row(21)

FOR_A_CPU = "-mavx2" if IS_X86 else "-mtune=cortex-a72"

# Text that a shell, make or ninja would act on; a compiler only sees odd names of macros.
INERT = (
    "-DA=$(touch canary)", "-DA=$$(touch canary)", "-DA=`touch canary`", "-DA=;touch canary",
    "-DA=|touch canary", "-DA=&touch canary", "-DA=>canary", "-DA=\ntouch canary", "-DA=${IFS}",
    "-DA=%n", "-DA=é", "-DA='", '-DA="', "-DA=\\", "-DA= ", "-DA=#", "-DA=\x01", "-DA=@canary",
)  # fmt: skip

# unit/test_flags.py has all that are refused. {dir} has what they name.
REFUSED = {
    "extra_cflags": ("@{dir}/flags", "-wrapper {dir}/evil", "-fplugin={dir}/evil.so", "-B{dir}/"),
    "extra_ldflags": ("-Wl,@{dir}/flags", "-Wl,-plugin,{dir}/evil.so", "-Wl,-o,{dir}/canary"),
}


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose programs leave a canary, here and wherever they are run from."""
    directory = tmp_path / "evil"
    directory.mkdir()
    for name in ("evil", "cc1plus", "as", "ld", "collect2", "g++"):
        script = write(directory / name, f"#!/bin/sh\ntouch {directory}/canary\nexit 1\n")
        script.chmod(0o755)
    write(directory / "flags", f"-B{directory}/\n")
    write(directory / "specs", f"*cc1plus:\n-fplugin={directory}/evil.so\n")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return directory


def canaries(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("canary*"))


@pytest.mark.parametrize("argument", REFUSED)
def test_a_flag_that_reaches_past_the_plan_is_refused(
    argument: str, tmp_path: Path, prepared: Path, value: Callable[..., int]
) -> None:
    source = write(tmp_path / "op.cpp", returning(21))
    for flags in REFUSED[argument]:
        with pytest.raises(SpecError, match="is not allowed"):
            value(source, **{argument: flags.replace("{dir}", str(prepared)).split()})
    assert canaries(tmp_path) == []


@pytest.mark.parametrize("variable", ["CXXFLAGS", "CPPFLAGS", "LDFLAGS"])
def test_a_variable_gives_no_flag_that_an_author_may_not_give(
    variable: str,
    tmp_path: Path,
    prepared: Path,
    value: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = write(tmp_path / "op.cpp", returning(21))
    for flag in (f"@{prepared}/flags", f"-B{prepared}/", f"-specs={prepared}/specs"):
        monkeypatch.setenv(variable, flag)
        with pytest.raises(SpecError, match="is not allowed"):
            value(source)
    assert canaries(tmp_path) == []


@pytest.mark.parametrize("flag", ["", "-D\0A", "-DA=\ud800"], ids=ascii)
def test_a_flag_that_cannot_be_passed_is_refused(
    flag: str, tmp_path: Path, value: Callable[..., int]
) -> None:
    source = write(tmp_path / "op.cpp", returning(21))
    with pytest.raises(SpecError):
        value(source, extra_cflags=[flag])


def test_only_toolchain_programs_are_started_whatever_the_flags(
    tmp_path: Path, prepared: Path, processes: Callable[..., list[Loader]]
) -> None:
    source = write(tmp_path / "op.cpp", returning(21))
    log = tmp_path / "log"
    with Loader(prefix=strace(log)) as process:
        for start in range(0, len(INERT), 6):
            answer = process.load("op", source, extra_cflags=list(INERT[start : start + 6]))
            assert answer.value == 21, answer
    assert canaries(tmp_path) == []
    started = {call.path for call in calls(log) if call.name == "execve" and not call.failed}
    names = {os.path.basename(path) for path in started}
    assert {"cc1plus", "as", "ld"} <= names
    interpreters = {name for name in names if name.startswith("python")}
    # The observer is C: cc1 compiles it.
    assert names - interpreters <= {"g++", "cc1plus", "cc1", "as", "collect2", "ld"}
    assert all(os.path.dirname(path) not in (str(prepared), os.getcwd()) for path in started)


ORDINARY = (
    "-O2", "-g", "-Wall", "-Wextra", "-Werror=return-type", "-march=native", "-ffast-math",
    "-fopenmp", "-pthread", FOR_A_CPU, "-funroll-loops", "-fno-exceptions", "-fno-rtti",
    "-std=c++20", "-DX=1", "-UX", "-Wno-unused", "-include", "cstdint", "-fmax-errors=1",
    "-Wp,-D_FORTIFY_SOURCE=2", "-Wa,--noexecstack", "-fstack-protector-strong", "-pipe",
)  # fmt: skip
ORDINARY_LINK = (
    "-Wl,--as-needed", "-Wl,-O1", "-Wl,-z,relro,-z,now", "-Wl,-rpath,/opt/x", "-lm", "-ldl",
    "-L/opt/x", "-Wl,--no-undefined", "-Wl,--exclude-libs,ALL", "-Xlinker", "--as-needed",
    "-static-libstdc++", "-static-libgcc", "-pthread", "-s", "-Wl,--build-id=sha1",
    "-Wl,-soname,x.so", "-Wl,--version-script={script}", "-Wl,-Bsymbolic", "-rdynamic",
)  # fmt: skip


def test_ordinary_flags_are_taken(tmp_path: Path, value: Callable[..., int]) -> None:
    source = write(tmp_path / "op.cpp", returning(21))
    script = write(tmp_path / "script", "{ global: *; };\n")
    links = [flag.replace("{script}", str(script)) for flag in ORDINARY_LINK]
    assert value(source, extra_cflags=list(ORDINARY), extra_ldflags=links) == 21
