"""Row 19: a hostile name is refused, or harmless; it never reaches a shell or leaves the cache."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, returning, write

import opkiln
from opkiln.base.model import Op, OpSpec
from opkiln.errors import SpecError
from opkiln.loading.explain import explain

if TYPE_CHECKING:
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.row(19)

HOSTILE = (
    "../../x", "/etc/x", "..", ".", "", "a/b", "a;touch b", "$(touch canary)", "`touch canary`",
    "a\nb", "a\0b", "a" * 10_000, "a" * 101, "-o", "--help", "-Wl,-rpath", "@file", "a b", " a",
    "a ", "ä", "Ω", "\uff41", "a\u200b", "1a", "%n", "a%s", "a.so", "a\\b", "a'b", 'a"b', "a&b",
    "a|b", "a>b", "a*b", "~", "~root", "{a}", "a:b", "a=b", "a,b", "a#b", "\udcff", "\ud800",
    "\x7f", "\x1b[31m", "manifest.json", "staging/x", "locks/../x", "CON", "a\tb", "a\rb",
    "../" * 3000,
)  # fmt: skip
PIECES = (
    "..", "/", "a", "B", "_", "0", ";", "$(touch canary)", "`", "\n", "\0", " ", "-", "@", "\\",
    "'", '"', "é", "\u202e", "\udc80", "%", "*", "~", "touch canary", "|", "&", ".", "x" * 60,
)  # fmt: skip


def everything_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def load(name: str, source: Path) -> int | None:
    """The value of a safe build; None for a name that was refused clearly."""
    try:
        library = opkiln.load(name, [str(source)], is_python_module=False, abi="none")
    except SpecError as error:
        refusal = error
    else:
        return int(library.value())
    assert "cannot be the name of an op" in refusal.what
    assert len(str(refusal)) < 1000
    assert all(char.isprintable() for char in refusal.what)
    return None


def is_safe(name: str) -> bool:
    return name.isascii() and name.isidentifier() and len(name) <= 100


@pytest.fixture
def source(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return write(work / "op.cpp", returning(19))


@pytest.mark.parametrize("known", [True, False], ids=["compiler known", "compiler unknown"])
def test_each_hostile_name_is_a_clear_error(
    known: bool, tmp_path: Path, source: Path, cache: Path
) -> None:
    if known:
        assert load("op", source) == 19
    before = everything_below(tmp_path)
    for name in HOSTILE:
        assert load(name, source) == (19 if is_safe(name) else None), ascii(name[:60])
    assert everything_below(tmp_path) == before
    assert not any(name.startswith(("canary", "b")) for name in everything_below(tmp_path))


def test_random_names_are_refused_or_built_safely(
    cases: Cases, tmp_path: Path, source: Path, cache: Path
) -> None:
    chance = random.Random(19)
    assert load("op", source) == 19
    before = everything_below(tmp_path)
    refused = 0
    for _ in cases(10_000, one_in=50):
        name = "".join(chance.choices(PIECES, k=chance.randrange(1, 5)))
        got = load(name, source)
        assert got == (19 if is_safe(name) else None), ascii(name)
        refused += got is None
    assert refused > cases.number // 2
    assert everything_below(tmp_path) == before
    ops = {path.name for path in (cache / "v1" / "ops" / "jit").iterdir()}
    assert all(is_safe(name) for name in ops)


def test_no_hostile_name_reads_outside_the_store(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slim machine, without a compiler, takes any build that it finds: but not anywhere."""
    monkeypatch.setenv("OPKILN_STORE_LAYERS", str(tmp_path / "layer"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in HOSTILE:
        if not is_safe(name):
            with pytest.raises(SpecError):
                opkiln.load(name, [str(source)], is_python_module=False, abi="none")


def test_explaining_a_hostile_name_is_a_clear_error_too(source: Path) -> None:
    for name in HOSTILE:
        if not is_safe(name):
            spec = OpSpec(name, "jit", str(source.parent), ("op.cpp",), kind="plain", abi="none")
            with pytest.raises(SpecError):
                explain(Op(spec))


def test_the_longest_name_that_is_taken_builds_and_loads(source: Path) -> None:
    name = "n" * 100
    with Loader() as process:
        assert process.load(name, source).value == 19
        assert process.load(name, source).origin == "store"
