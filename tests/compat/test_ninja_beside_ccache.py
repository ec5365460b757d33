"""Edits that a cache of compiles may overlook: what ``opkiln ninja`` serves, and what ccache does.

``pytest -s`` prints the table. What ccache serves is recorded, not asserted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sample.ninja_project import NINJA, Project, needs_ninja

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    needs_ninja, pytest.mark.skipif(shutil.which("ccache") is None, reason="ccache is not here")
]  # fmt: skip

GCC = shutil.which("gcc") or ""
PROGRAM = '#include <stdio.h>\n%s\nint main(void) { printf("%%d", V); return 0; }\n'
GRAPH = """
rule cc
  command = {cache} {compiler} {flags} -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = gcc $in -o $out
build main.o: cc main.c
build app: link main.o
"""
DATA = 'asm(".data\\nv: ." "incbin \\"data.bin\\"\\n.byte 0, 0, 0");\nextern int v;\n#define V v'
WRAPPER = '#!/bin/sh\nexec {program} {flag} "$@"\n'


class Case(NamedTuple):
    """A program that prints what it was compiled from, and an edit of that."""

    files: dict[str, str]
    edit: Callable[[Path], object]
    flags: str = ""
    compiler: str = "gcc"
    variables: tuple[tuple[str, str], ...] = ()  # of the second build


def replace(path: Path) -> None:
    """Another program of the same size, under the same time."""
    before = path.stat()
    path.write_text(path.read_text().replace("=1 ", "=2 "))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CASES = {
    "a new header in front of another": Case(
        {"main.c": PROGRAM % '#include "a.h"', "first/no.h": "", "second/a.h": "#define V 1\n"},
        lambda at: (at / "first/a.h").write_text("#define V 2\n"), "-Ifirst -Isecond",
    ),
    "__has_include of a file that was missing": Case(
        {"main.c": PROGRAM % "#if __has_include(<a.h>)\n#define V 2\n#else\n#define V 1\n#endif",
         "first/no.h": ""},
        lambda at: (at / "first/a.h").write_text(""), "-Ifirst",
    ),
    "a file that the assembler includes": Case(
        {"main.c": PROGRAM % DATA, "data.bin": "\1"},
        lambda at: (at / "data.bin").write_text("\2"),
    ),
    "a compiler of the same size and time": Case(
        {"main.c": PROGRAM % "", "tools/gcc": WRAPPER.format(program=GCC, flag="-DV=1")},
        lambda at: replace(at / "tools/gcc"), compiler="tools/gcc",
    ),
    "another assembler below -B": Case(
        {"main.c": PROGRAM % 'asm(".data\\nv: .int number");\nextern int v;\n#define V v',
         "tools/as": WRAPPER.format(program=shutil.which("as"), flag="--defsym=number=1")},
        lambda at: replace(at / "tools/as"), "-Btools/",
    ),
    "CPATH": Case(
        {"main.c": PROGRAM % "#include <a.h>", "first/a.h": "#define V 2\n",
         "second/a.h": "#define V 1\n"},
        lambda at: None, "-idirafter second", variables=(("CPATH", "first"),),
    ),
}  # fmt: skip


def test_edits_that_other_caches_overlook_are_seen(tmp_path: Path) -> None:
    projects = {}
    for number, case in enumerate(CASES.values()):
        for who in ("plain", "ccache", "opkiln"):
            project = projects[number, who] = Project(tmp_path / who / str(number))
            for name, text in case.files.items():
                project.write(name, text)
                (project.path / name).chmod(0o755)
            cache = "ccache" if who == "ccache" else ""
            project.write("build.ninja", GRAPH.format(cache=cache, **case._asdict()))
    time.sleep(2)  # ccache keeps nothing that includes a file of this second

    def build(number: int, who: str, **more: str) -> int:
        project = projects[number, who]
        project.clean()
        if who == "opkiln":
            assert project.build(**more).status == 0
        else:
            variables = {**os.environ, "CCACHE_DIR": str(tmp_path / "cache"), **more}
            subprocess.run(
                [NINJA], cwd=project.path, env=variables, check=True, capture_output=True
            )
        return int(project.run("app"))

    print(f"\n{'edited':42}plain ccache opkiln")
    wrong = []
    for number, (name, case) in enumerate(CASES.items()):
        assert [build(number, who) for who in ("plain", "ccache", "opkiln")] == [1, 1, 1], name
        assert [build(number, who) for who in ("ccache", "opkiln")] == [1, 1], name
        for who in ("plain", "ccache", "opkiln"):
            case.edit(projects[number, who].path)
        plain, ccache, ours = (
            build(number, who, **dict(case.variables)) for who in ("plain", "ccache", "opkiln")
        )
        assert plain == 2, name
        print(f"{name:42}{plain:5}{ccache:7}{ours:7}")
        wrong += [name] if ours != plain else []
    assert wrong == []
