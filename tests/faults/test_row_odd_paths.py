"""Row 20: whatever a directory is called, ops build in it and edits in it are seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loaders import returning, write
from sample import known

import opkiln
from opkiln.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fault_rows import Cases

pytestmark = pytest.mark.row(20)

ODD = (
    "a b", " a", "a ", "a  b", "a'b", 'a"b', "a$b", "$HOME", "$(touch canary)", "`touch canary`",
    "a%b", "%s%n", "a#b", "#a", "a:b", "a: b", "a\\b", "a\\\\b", "a\\ b", "a\\#b", "a\\$b", "a\\",
    "a\tb", "a\rb", "-a", "--help", "@a", "a@b", "a,b", "a;touch canary", "a&b", "a|b", "a>b",
    "a*b", "a?b", "[ab]", "{a,b}", "(a)", "~", "a!b", "a^b", "a+b", "é", "e\u0301", "漢字", "🔥",
    "\u202ea", "a\u00a0b", "...", "a\x1bb", os.fsdecode(b"\xff\xfe"), "x" * 200, "{src}", "a/../b",
    TOGETHER := f"a'b/%s%n/@a/--help/a;touch canary/a\tb/漢字/{'x' * 200}",
    QUOTED := "a b/$(touch canary)/a#b/a: b/a\\ b/a\rb/{src}",
)  # fmt: skip
REFUSED = ("a=b", "a\nb", "a\\:b")
# Most stand in two paths together: none hides what another does. The full run has each alone.
KINDS = (TOGETHER, QUOTED, "a\\", os.fsdecode(b"\xff\xfe"), "a/../b")


def op_in(directory: Path, number: int) -> tuple[Path, Path, list[str]]:
    """(source, header, include directories) of an op that lies in a directory."""
    write(directory / "own.h", "#define OWN 1\n")
    header = write(directory / "include" / "number.h", f"#define NUMBER {number}\n")
    source = directory / "op.cpp"
    write(source, returning("NUMBER + 0 * OWN", '#include "own.h"\n#include "number.h"'))
    return source, header, [str(directory / "include")]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in KINDS else pytest.mark.full) for name in ODD],
    ids=lambda name: ascii(name[:20]),
)
def test_an_op_in_an_oddly_named_directory_builds_and_its_edits_are_seen(
    name: str, tmp_path: Path, value: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name.split("/", maxsplit=1)[0]).mkdir()
    source, header, includes = op_in(tmp_path / name, 100)
    assert value(source, extra_include_paths=includes) == 100
    write(header, "#define NUMBER 200\n")
    assert value(source, extra_include_paths=includes) == 200
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.parametrize("name", REFUSED, ids=ascii)
@pytest.mark.parametrize("where", ["source", "include"])
def test_a_directory_that_no_compiler_can_report_is_one_clear_error(
    name: str, where: str, tmp_path: Path, value: Callable[..., int]
) -> None:
    source, _, includes = op_in(tmp_path / "plain", 100)
    odd_source, _, odd_includes = op_in(tmp_path / name, 100)
    if where == "source":
        source = odd_source
    else:
        includes = odd_includes
    with pytest.raises(SpecError, match="cannot be built from"):
        value(source, extra_include_paths=includes)


def test_the_store_and_the_staging_directory_may_have_odd_names(
    tmp_path: Path, value: Callable[..., int], monkeypatch: pytest.MonkeyPatch, cases: Cases
) -> None:
    step = len(ODD) // cases.count(18, least=3)
    for name in ODD[::step]:
        cases.tried()
        _in_an_odd_store(name, tmp_path / f"{ODD.index(name)}", value, monkeypatch)


def _in_an_odd_store(
    name: str, tmp_path: Path, value: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd" / name.split("/", maxsplit=1)[0]).mkdir(parents=True)
    (tmp_path / "odd" / name / "scratch").mkdir(parents=True)
    store = known.make_store(tmp_path / "odd" / name / "cache")
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(store))
    monkeypatch.setenv("OPKILN_TMPDIR", str(tmp_path / "odd" / name / "scratch"))
    source, header, includes = op_in(tmp_path / "plain", 100)
    assert value(source, extra_include_paths=includes) == 100
    write(header, "#define NUMBER 200\n")
    assert value(source, extra_include_paths=includes) == 200
    assert list((tmp_path / "odd" / name / "scratch").iterdir()) == []


SOURCES = ("-o.cpp", "@args.cpp", "a b.cpp", "$(touch canary).cpp", "a;b.cpp", "a\\.cpp", "é.cpp")


def test_sources_may_have_odd_names(tmp_path: Path) -> None:
    for number in (1, 2):
        for at, name in enumerate(SOURCES):
            write(tmp_path / name, f"int part{at}() {{ return {number}; }}\n")
        parts = [f"part{at}()" for at in range(len(SOURCES))]
        calls = returning(" + ".join(parts), "".join(f"int {each};" for each in parts))
        paths = [str(write(tmp_path / "op.cpp", calls)), *(str(tmp_path / n) for n in SOURCES)]
        library = opkiln.load("op", paths, is_python_module=False, abi="none", verbose=True)
        assert library.value() == number * len(SOURCES)
    assert not list(tmp_path.rglob("canary"))
