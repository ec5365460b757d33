"""Rows 9 and 30 for the link: a library that was replaced, or that now comes first, is noticed."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from loaders import let_rest, returning, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.row(30), pytest.mark.timed]

DECLARED = 'extern "C" int number(void);'


def static_library(path: Path, number: int) -> None:
    """An archive, replaced in place and under its old time."""
    source = write(path.with_suffix(".c"), f"int number(void) {{ return {number}; }}\n")
    made = path.with_suffix(".o")
    subprocess.run(["gcc", "-fPIC", "-c", str(source), "-o", str(made)], check=True)
    before = path.stat() if path.exists() else None
    path.unlink(missing_ok=True)
    subprocess.run(["ar", "rcs", str(path), str(made)], check=True)
    if before is not None:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


WAYS = {
    "by path": ["{dir}/libnumber.a"],
    "by name": ["-L{dir}", "-lnumber"],
    "in two words": ["-L", "{dir}", "-l", "number"],
    "by its whole name": ["-L{dir}", "-l:libnumber.a"],
    "through the linker": ["-Wl,--whole-archive,{dir}/libnumber.a,--no-whole-archive"],
    "by LIBRARY_PATH": ["-lnumber"],
    "by LDFLAGS": [],
}


def test_a_static_library_that_was_replaced_is_linked_anew(
    tmp_path: Path, value: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = tmp_path / "lib"
    libraries.mkdir()
    source = write(tmp_path / "src" / "op.cpp", returning("number()", DECLARED))
    environment = {"by LIBRARY_PATH": ("LIBRARY_PATH", "{dir}"),
                   "by LDFLAGS": ("LDFLAGS", "-L{dir} -lnumber")}  # fmt: skip
    stale = []
    for number in (1, 2):
        static_library(libraries / "libnumber.a", number)
        let_rest()
        for index, (way, flags) in enumerate(WAYS.items()):
            with monkeypatch.context() as patch:
                if way in environment:
                    variable, text = environment[way]
                    patch.setenv(variable, text.replace("{dir}", str(libraries)))
                more = [flag.replace("{dir}", str(libraries)) for flag in flags]
                if value(source, f"op{index}", extra_ldflags=more) != number:
                    stale.append((number, way))
    assert stale == []


def test_a_library_that_now_comes_first_is_linked(
    tmp_path: Path, value: Callable[..., int]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    static_library(second / "libnumber.a", 2)
    source = write(tmp_path / "src" / "op.cpp", returning("number()", DECLARED))
    more = {"extra_ldflags": [f"-L{first}", f"-L{second}", "-lnumber"]}
    let_rest()
    assert value(source, **more) == 2
    first.mkdir()
    static_library(first / "libnumber.a", 1)
    assert value(source, **more) == 1


def test_a_version_script_that_was_edited_is_used_anew(
    tmp_path: Path, value: Callable[..., int]
) -> None:
    script = write(tmp_path / "script", "{ global: *; };\n")
    source = write(tmp_path / "src" / "op.cpp", returning(7))
    flags = {"extra_ldflags": [f"-Wl,--version-script={script}"]}
    let_rest()
    assert value(source, **flags) == 7
    write(script, "{ global: other; local: *; };\n")
    with pytest.raises(AttributeError):
        value(source, **flags)
