"""Whole projects whose ninja is opkiln's: torch's BuildExtension, CMake, and ninjas from PyPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sample.ninja_project import NINJA, Project, needs_ninja

from opkiln.compat.ninja import front

pytestmark = needs_ninja

SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
sources = ["module.cpp", *(f"part{number}.cpp" for number in range(5))]
extension = CppExtension("six", sources, extra_compile_args=["-g0"])
setup(name="six", ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
"""
MODULE = """
#include <Python.h>
#include "parts.h"
static PyObject* total(PyObject*, PyObject*) {
  return PyLong_FromLong(part0() + part1() + part2() + part3() + part4());
}
static PyMethodDef methods[] = {{"total", total, METH_NOARGS, nullptr}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "six", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_six() { return PyModule_Create(&definition); }
"""
PARTS = "".join(f"int part{number}();\n" for number in range(5))

CMAKE = """
cmake_minimum_required(VERSION 3.13)
project(generated C)
configure_file(version.h.in version.h)
add_custom_command(OUTPUT table.h DEPENDS table.txt
  COMMAND sh ${CMAKE_SOURCE_DIR}/table.sh ${CMAKE_SOURCE_DIR}/table.txt table.h)
add_library(some STATIC a.c b.c ${CMAKE_BINARY_DIR}/table.h)
target_include_directories(some PUBLIC ${CMAKE_BINARY_DIR})
add_executable(program main.c)
target_link_libraries(program some)
"""
CMAKE_FILES = {
    "CMakeLists.txt": CMAKE,
    "version.h.in": "#define VERSION 3\n",
    "table.txt": "5",
    "table.sh": 'echo "#define TABLE $(cat "$1")" > "$2"\n',
    "a.c": '#include "version.h"\nint a(void) { return VERSION; }\n',
    "b.c": '#include "table.h"\nint b(void) { return TABLE; }\n',
    "main.c": '#include <stdio.h>\nint a(void), b(void);\n'
    'int main(void) { printf("%d\\n", a() + b()); }\n',
}  # fmt: skip


def environment(trace: Path, **more: str) -> dict[str, str]:
    """This one, with opkiln's ninja first on PATH; no Python gets the import hook."""
    path = f"{front.SHIM}:{os.environ['PATH']}"
    return {**os.environ, **front.environment(), "PATH": path, "OPKILN_TRACE": str(trace), **more}


def served(trace: Path) -> tuple[list[str], list[str]]:
    return Project.served(trace)


def write_six(path: Path) -> Path:
    path.mkdir()
    (path / "setup.py").write_text(SETUP)
    (path / "module.cpp").write_text(MODULE)
    (path / "parts.h").write_text(PARTS)
    for number in range(5):
        text = f'#include "parts.h"\nint part{number}() {{ return {number}; }}\n'
        (path / f"part{number}.cpp").write_text(text)
    return path


def build_six(path: Path, trace: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=path, env=environment(trace), check=True, capture_output=True)
    code = "import six; print(six.total())"
    done = subprocess.run([sys.executable, "-c", code], cwd=path, check=True, capture_output=True)
    assert done.stdout == b"10\n"


def test_build_ext_of_torch_compiles_six_sources_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    build_six(write_six(tmp_path / "one"), tmp_path / "one.trace")
    hits, misses = served(tmp_path / "one.trace")
    assert (len(hits), len(misses)) == (0, 6)
    build_six(write_six(tmp_path / "other"), tmp_path / "other.trace")
    hits, misses = served(tmp_path / "other.trace")
    assert (len(hits), len(misses)) == (6, 0)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake on PATH")
def test_a_cmake_project_with_generated_headers(tmp_path: Path) -> None:
    def build(project: Path, trace: str) -> tuple[list[str], list[str], bytes]:
        variables = environment(tmp_path / f"{trace}.json")
        configure = ["cmake", "-G", "Ninja", "-S", ".", "-B", "build"]
        for command in (configure, ["cmake", "--build", "build"]):
            subprocess.run(command, cwd=project, env=variables, check=True, capture_output=True)
        said = subprocess.run([project / "build/program"], check=True, capture_output=True).stdout
        return *served(tmp_path / f"{trace}.json"), said

    def write(project: Path) -> Path:
        project.mkdir()
        for name, text in CMAKE_FILES.items():
            (project / name).write_text(text)
        return project

    project = write(tmp_path / "project")
    made = ["a.c", "b.c", "libsome.a", "main.c", "program"]
    assert len((built := build(project, "first"))[1]) == len(made)
    assert built[2] == b"8\n"
    shutil.rmtree(project / "build")
    hits, misses, said = build(project, "again")
    assert (len(hits), misses, said) == (len(made), [], b"8\n")
    hits, misses, said = build(write(tmp_path / "elsewhere"), "elsewhere")
    assert (len(hits), misses, said) == (len(made), [], b"8\n")
    (project / "table.txt").write_text("6")
    hits, misses, said = build(project, "edited")
    assert "b.c" in " ".join(misses)
    assert "a.c" not in " ".join(misses)
    assert said == b"9\n"
    plain = subprocess.run([NINJA, "-C", project / "build"], check=True, capture_output=True)
    assert b"no work to do" in plain.stdout


def ninjas() -> list[Path]:
    """The releases that ``make test-jits`` has installed, each in a directory of its own."""
    return sorted((Path(sys.prefix) / "ninjas").glob("*/bin"))


@pytest.mark.parametrize(
    "place",
    ninjas()
    or [pytest.param(Path(), marks=pytest.mark.skip(reason="no other ninjas: make test-jits"))],
    ids=lambda place: place.parent.name,
)
def test_a_ninja_from_pypi_is_served_and_plain_ninja_goes_on(place: Path, tmp_path: Path) -> None:
    graph = "build out/a.o: cc a.c\nbuild out/b.o: cc b.c\nbuild out/all: link out/a.o out/b.o\n"
    project = Project(
        tmp_path / "project", graph, a__c="int b(void);\nint main(void) { return b(); }\n",
        b__c="int b(void) { return 0; }\n",
    )  # fmt: skip
    own = str(place.parent)
    variables = {"PATH": f"{place}:{os.environ['PATH']}"}

    def with_packages(trace: Path) -> dict[str, str]:
        path = f"{front.SHIM}:{variables['PATH']}"
        return environment(trace, PATH=path, PYTHONPATH=f"{Path(front.SHIM).parents[3]}:{own}")

    for name, expected in (("first", (0, 3)), ("again", (3, 0))):
        shutil.rmtree(project.path / "out", ignore_errors=True)
        trace = tmp_path / name
        subprocess.run(
            ["ninja"], cwd=project.path, env=with_packages(trace), check=True, capture_output=True
        )
        hits, misses = served(trace)
        assert (len(hits), len(misses)) == expected
    alone = {**os.environ, **variables, "PYTHONPATH": own}
    plain = subprocess.run(["ninja"], cwd=project.path, env=alone, check=True, capture_output=True)
    assert b"no work to do" in plain.stdout
