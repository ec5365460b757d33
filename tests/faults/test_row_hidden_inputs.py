"""Row 29: a variable that changes a compiler's result is part of the key, or kept from it."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, let_rest, returning, write

from opkiln.base.model import Op, OpSpec
from opkiln.loading.explain import explain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.row(29)

OPTIONAL = "#if __has_include(<number.h>)\n#include <number.h>\n#else\n#define NUMBER 0\n#endif"


def headers(tmp_path: Path) -> list[Path]:
    """Three directories, each with a number.h of its own."""
    places = [tmp_path / f"include{number}" for number in (1, 2, 3)]
    for number, place in enumerate(places, 1):
        write(place / "number.h", f"#define NUMBER {number}\n")
    return places


def explained(source: Path) -> str:
    spec = OpSpec("op", "jit", str(source.parent), (source.name,), kind="plain", abi="none")
    return str(explain(Op(spec)))


@pytest.mark.timed
@pytest.mark.parametrize(
    "variable", ["CPATH", pytest.param("CPLUS_INCLUDE_PATH", marks=pytest.mark.full)]
)
def test_a_search_path_from_the_environment_is_part_of_the_key(
    variable: str, tmp_path: Path, value: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = headers(tmp_path)
    source = write(tmp_path / "src" / "op.cpp", returning("NUMBER", OPTIONAL))
    assert value(source) == 0
    for paths, number in (([one], 1), ([two, one], 2), ([], 0)):
        monkeypatch.setenv(variable, os.pathsep.join(map(str, paths)))
        assert value(source) == number, paths
    monkeypatch.setenv(variable, f"{one}{os.pathsep}{two}")
    let_rest()
    assert value(source) == 1
    write(one / "number.h", "#define NUMBER 4\n")
    assert value(source) == 4
    (one / "number.h").unlink()
    assert value(source) == 2
    write(one / "number.h", "#define NUMBER 5\n")
    assert value(source) == 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, three.name)  # relative to where the user is
    assert value(source) == 3


@pytest.mark.timed
@pytest.mark.parametrize(
    "variable",
    ["CXXFLAGS", *(pytest.param(each, marks=pytest.mark.full)
                   for each in ("CPPFLAGS", "OPKILN_CXXFLAGS"))],
)  # fmt: skip
def test_flags_from_the_environment_are_part_of_the_key(
    variable: str, tmp_path: Path, value: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, two, _) = headers(tmp_path)
    source = write(tmp_path / "src" / "op.cpp", returning("NUMBER", OPTIONAL))
    assert value(source) == 0
    for flags, number in ((f"-I{one}", 1), (f"-isystem {two}", 2), (f"'-I{one}' -O0", 1), ("", 0)):
        monkeypatch.setenv(variable, flags)
        assert value(source) == number, flags
    monkeypatch.setenv(variable, f"-I {two}")
    let_rest()
    assert value(source) == 2
    write(two / "number.h", "#define NUMBER 6\n")
    assert value(source) == 6


def archive(directory: Path, number: int) -> Path:
    source = write(directory / "number.c", f"int number(void) {{ return {number}; }}\n")
    library = directory / "libnumber.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return directory


@pytest.mark.parametrize("variable", ["LIBRARY_PATH", "LDFLAGS"])
def test_where_libraries_are_found_is_part_of_the_key(variable: str, tmp_path: Path) -> None:
    source = write(tmp_path / "op.cpp", returning("number()", 'extern "C" int number(void);'))
    for number in (1, 2, 1):
        place = archive(tmp_path / f"lib{number}", number)
        text = str(place) if variable == "LIBRARY_PATH" else f"-L{place}"
        # A process of its own: one that has a libnumber.so loaded looks for no other.
        with Loader({variable: text}) as process:
            answer = process.load("op", source, extra_ldflags=["-lnumber", f"-Wl,-rpath,{place}"])
        assert answer.value == number, answer


# Each variable, with what it would do to a compiler that saw it. {dir} is a directory whose
# number.h is foreign and whose cc1plus, as and ld leave a canary.
DROPPED = {
    "C_INCLUDE_PATH": "{dir}",
    "OBJC_INCLUDE_PATH": "{dir}",
    "GCC_EXEC_PREFIX": "{dir}/",
    "COMPILER_PATH": "{dir}",
    "GCC_COMPARE_DEBUG": "-gtoggle",
    "DEPENDENCIES_OUTPUT": "{dir}/canary",
    "SUNPRO_DEPENDENCIES": "{dir}/canary",
    "LD_RUN_PATH": "{dir}",
    "LDEMULATION": "elf_i386",
    "GNUTARGET": "srec",
    "CFLAGS": "-I{dir}",
    "MAKEFLAGS": "-n",
    "SOURCE_DATE_EPOCH": "1",
    "COLLECT_NO_DEMANGLE": "1",
    "CCC_OVERRIDE_OPTIONS": "+-I{dir}",
    "NVCC_PREPEND_FLAGS": "-I{dir}",
    "NVCC_APPEND_FLAGS": "-I{dir}",
}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    directory = tmp_path / "foreign"
    write(directory / "number.h", "#define NUMBER 99\n")
    for name in ("cc1plus", "as", "ld", "collect2", "real-ld"):
        script = write(directory / name, f"#!/bin/sh\ntouch {directory}/canary\nexit 1\n")
        script.chmod(0o755)
    return directory


def test_variables_that_nobody_means_for_opkiln_reach_no_compiler_and_are_named(
    tmp_path: Path, foreign: Path, value: Callable[..., int], monkeypatch: pytest.MonkeyPatch,
    cases: Cases,
) -> None:  # fmt: skip
    source = write(tmp_path / "src" / "op.cpp", returning("NUMBER + SALT", OPTIONAL))
    groups = [[each] for each in DROPPED] if cases.whole else [list(DROPPED)]
    for salt, group in enumerate(groups):
        with monkeypatch.context() as patch:
            for variable in group:
                cases.tried()
                patch.setenv(variable, DROPPED[variable].replace("{dir}", str(foreign)))
            assert value(source, extra_cflags=[f"-DSALT={salt}"]) == salt, group
            named = explained(source)
            assert [variable for variable in group if variable not in named] == []
        assert [variable for variable in group if variable in explained(source)] == []
    assert not (foreign / "canary").exists()


def test_a_build_with_dropped_variables_is_the_same_build(
    tmp_path: Path, foreign: Path, processes: Callable[..., list[Loader]]
) -> None:
    """They are not keyed either: whoever has them unset shares the entry."""
    source = write(tmp_path / "src" / "op.cpp", returning("NUMBER", OPTIONAL))
    env = {name: text.replace("{dir}", str(foreign)) for name, text in DROPPED.items()}
    (with_them,) = processes(1, env)
    (without,) = processes(1)
    first = with_them.load("op", source)
    assert (first.value, first.origin) == (0, "built")
    second = without.load("op", source)
    assert (second.value, second.origin, second.path) == (0, "store", first.path)


def test_every_variable_that_gcc_documents_is_keyed_or_dropped() -> None:
    from opkiln.settings import DROPPED as DECLARED
    from opkiln.settings import table

    # From "Environment Variables Affecting GCC" and the manuals of ld and nvcc.
    known = {
        "GCC_COMPARE_DEBUG", "GCC_EXEC_PREFIX", "COMPILER_PATH", "LIBRARY_PATH", "CPATH",
        "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "OBJC_INCLUDE_PATH", "DEPENDENCIES_OUTPUT",
        "SUNPRO_DEPENDENCIES", "SOURCE_DATE_EPOCH", "LD_RUN_PATH", "GNUTARGET", "LDEMULATION",
        "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "TMPDIR",
    }  # fmt: skip
    read = {name for setting in table() for name in setting.names}
    assert known <= read | set(DECLARED)


@pytest.mark.timed
def test_another_tool_that_comes_first_on_path_is_another_toolchain(
    tmp_path: Path, value: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """g++ takes `as` and `ld` from PATH: one that appears there is noticed."""
    source = write(tmp_path / "op.cpp", returning(29))
    real = shutil.which("as")
    first = tmp_path / "bin"
    log = tmp_path / "assembled"
    first.mkdir()
    monkeypatch.setenv("PATH", f"{first}{os.pathsep}{os.environ['PATH']}")
    assert value(source) == 29
    let_rest()
    assert value(source) == 29
    script = write(first / "as", f'#!/bin/sh\necho used >> {log}\nexec {real} "$@"\n')
    script.chmod(0o755)
    assert value(source) == 29
    assert log.exists()
