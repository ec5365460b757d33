"""Names become paths in one place, and none leads out of the store."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import opkiln
from opkiln.base.model import OpSpec, place_of
from opkiln.builder.base import DeclaredFunctions
from opkiln.decision import prebuilt
from opkiln.errors import SpecError
from opkiln.machine.facts import Hasher
from opkiln.plan.plan import check
from opkiln.store import archive
from opkiln.store.layers import Layer, Location, Store

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[2] / "src" / "opkiln"

PIECES = st.sampled_from(
    ["..", "/", "a", "B", "_", "0", ".", "-", "\\", "\0", "\n", " ", "~", "é", "\udc80", "\u202e",
     "ops", "v1", "x" * 60, "*", "%", "$(a)", "!"]
)  # fmt: skip
NAMES = st.lists(PIECES, max_size=6).map("".join) | st.text(max_size=20)
DISTRIBUTIONS = ("opkiln", "jit", "my_package", "my-package", "zope.interface", "größe", "7z", "a")


@given(NAMES, NAMES)
def test_a_place_is_two_levels_below_its_root_or_an_error(distribution: str, op: str) -> None:
    try:
        place = place_of(distribution, op)
    except SpecError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.what.isprintable()
        assert len(str(refused)) < 1000
        str(refused).encode()  # a lone surrogate could not be printed
        return
    assert place.split("/") == [distribution, op]
    assert os.path.normpath(f"/store/ops/{place}") == f"/store/ops/{place}"
    assert not any(part.startswith((".", "-")) for part in place.split("/"))
    assert all(len(os.fsencode(part)) <= 100 for part in place.split("/"))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_name_that_a_package_may_have_is_taken(name: str) -> None:
    assert place_of(name, "op") == f"{name}/op"


HOSTILE = ("../../../x", "..", ".", "", "/etc", "a/b", "a\0b", "a\nb", "-o", ".a", "a" * 101,
           "\udcff", "a b", "ä" * 60)  # fmt: skip


def lookups() -> dict[str, Callable[[str], Any]]:
    def spec(distribution: str) -> OpSpec:
        return OpSpec("op", distribution, "/", ("op.cpp",))

    store = Store(Location((Layer("/nowhere"),), None, ()))
    return {
        "find": lambda name: store.find_op(name, "op", "0", None, {}, Hasher()),
        "targets": lambda name: list(store.targets(name, "op")),
        "prebuilt": lambda name: list(prebuilt.SearchedLayer("/nowhere", "").leaves(spec(name))),
        "bundle": lambda name: archive.leaves("/nowhere", name, "op"),
        "plan": lambda name: check(spec(name)),
    }


@pytest.mark.parametrize("look", lookups())
@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:10]))
def test_a_lookup_refuses_a_distribution_that_leads_elsewhere(look: str, name: str) -> None:
    with pytest.raises(SpecError, match="cannot be the name of a distribution"):
        lookups()[look](name)


@pytest.mark.parametrize("name", HOSTILE[:10], ids=lambda name: ascii(name[:10]))
def test_a_builder_with_a_hostile_distribution_writes_nothing(
    name: str, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "op.cpp").write_text('extern "C" int value() { return 1; }\n')

    class Builder(opkiln.OpBuilder):
        NAME, KIND, ABI = "op", "plain", "none"
        root = str(tmp_path)

        def sources(self) -> list[str]:
            return ["op.cpp"]

    def places() -> set[Path]:  # of this test alone: other tests' stores lie beside these
        return {*tmp_path.rglob("*"), *cache.parent.rglob("*")} - {*cache.rglob("*")}

    before = places()
    builder = Builder()
    builder.__dict__["distribution"] = name  # as DISTRIBUTION = name gives it, also where empty
    with pytest.raises(SpecError, match="cannot be the name of a distribution"):
        builder.load()
    assert places() == before
    assert not [*cache.rglob("receipts"), *cache.rglob("manifest.json")]


@pytest.mark.parametrize("name", ["a b", "../x", "a::b", "my-package", "ä", "1a"])
def test_a_namespace_that_torch_cannot_have_is_a_clear_error(name: str) -> None:
    class Builder(opkiln.OpBuilder):
        NAME, NAMESPACE = "op", name
        FUNCTIONS = DeclaredFunctions("of.another.module")

    with pytest.raises(SpecError, match="cannot be the namespace of op op"):
        Builder().registration()


def joins(code: str) -> list[str]:
    """The paths that a source makes of a distribution, each as its expression."""
    found = []
    for node in ast.walk(ast.parse(code)) if "distribution" in code else ():
        path = isinstance(node, ast.Call) and ast.unparse(node.func) == "os.path.join"
        if path or (isinstance(node, ast.JoinedStr) and "/" in ast.unparse(node).replace("</", "")):
            text = re.sub(r"place_of\([^()]*\)", "", ast.unparse(node))
            if re.search(r"\bdistribution\b", text):
                found.append(text)
    return found


def test_only_one_function_makes_a_path_of_a_distribution() -> None:
    sources = sorted(SOURCE.rglob("*.py"))
    assert len(sources) > 100, "the sources are not where this test looks for them"
    found = {str(path.relative_to(SOURCE)): joins(path.read_text()) for path in sources}
    assert {path: made for path, made in found.items() if made} == {
        "base/model.py": ["f'{distribution}/{op}'"]
    }


def test_another_path_made_of_a_distribution_would_be_found() -> None:
    assert joins("os.path.join(root, 'ops', spec.distribution, spec.name)")
    assert joins("f'ops/{distribution}/{op}'")
    assert not joins("os.path.join(root, 'ops', place_of(spec.distribution, spec.name))")
