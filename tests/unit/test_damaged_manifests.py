"""A manifest with any type in any place: a refusal that names the file, and no raw exception."""

from __future__ import annotations

import copy
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import fault_rows
import pytest
from sample import layer
from sample.levels import X86_V1

from opkiln.base.model import ABI_NONE, Op, OpSpec
from opkiln.decision import prebuilt
from opkiln.decision.terms import Request, Trace
from opkiln.errors import StoreError
from opkiln.machine import uname
from opkiln.machine.facts import Hasher
from opkiln.report import collect as report_cache
from opkiln.store import bundle, entry, inventory, key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPEC = OpSpec(
    name="one", distribution="somebody", sources=("op.cpp",), root="/nowhere", abi=ABI_NONE
)
_TARGET = {
    "backend": "cpu", "system": "linux", "machine": uname.architecture(), "cpu": X86_V1,
    "cpu_features": ["avx2"], "abi_tag": "none", "debug": False,
    "flags": [["cxxflags", ["-O2"]]], "archs": ["9.0"],
}  # fmt: skip
_WHOLE: dict[str, Any] = {
    "spec": key.spec_key(SPEC),
    "target": _TARGET,
    "needs": {"cpu": ["avx"], "sonames": ["libc.so.6"], "symbols": [["libc.so.6", "puts", "V"]],
              "images": ["sm_90"]},
    "toolchain": {"gcc": "12.2.0"},
    "seconds": 1.5, "max_rss": 100, "created": 1.5,
    "deps": {"own": [["src", "op.cpp", "0" * 64]], "others": ""},
}  # fmt: skip
_VALUES: tuple[Any, ...] = (None, 6, -1.5, True, "x", [], [6], [[6]], ["x"], {}, {"a": 6})

# The words of an exception that nobody meant for a user.
_RAW = re.compile(
    r"object has no attribute|is not iterable|is not subscriptable|unhashable|not supported between"
    r"|must be str|expected str|can only concatenate|takes \d|values to unpack|indices must be"
)


def kind_of(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "float" if isinstance(value, float) else "int"
    return type(value).__name__


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within a value."""
    if not isinstance(value, dict | list):
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*way, name)
        yield from places(each, (*way, name))


def fits(old: Any, new: Any, way: tuple[Any, ...]) -> bool:
    """Whether a value is of the kind that belongs there: then it is read, and judged."""
    if way[-1] in ("seconds", "created") and kind_of(new) in ("int", "float"):
        return True
    if isinstance(old, list) and new == []:
        return way[-1] != 0  # a row that is empty
    if isinstance(old, list) and new == ["x"]:
        return bool(old) and kind_of(old[0]) == "str" and way[-1] != 0
    if isinstance(old, dict):
        return kind_of(new) == "dict" and way[-1] != "toolchain"
    return kind_of(old) == kind_of(new) and not isinstance(old, list)


def changed(manifest: dict[str, Any], way: tuple[Any, ...], value: Any) -> tuple[Any, Any]:
    """(what was there, the manifest with the value in its place)."""
    found: Any = copy.deepcopy(manifest)
    inner = found
    for step in way[:-1]:
        inner = inner[step]
    old, inner[way[-1]] = inner[way[-1]], value
    return old, found


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    return layer.add(tmp_path / "layer", "one", b"\x7fELF", changes=copy.deepcopy(_WHOLE))


def read(leaf: Path) -> dict[str, Any]:
    return entry.parse_manifest((leaf / entry.MANIFEST).read_bytes())


def refusals(leaf: Path, tmp_path: Path) -> list[str]:
    """What everything that reads manifests says of one; none of it may raise but StoreError."""
    said = []
    trace = Trace()
    assert (
        prebuilt.find(Request(Op(SPEC)), [str(tmp_path / "layer/v1")], trace, prebuilt.LAYER)
        is None
    )
    said += trace.refusals()
    places = {"src": str(tmp_path), "opkiln": "/", "abs": ""}
    for own in (True, False):
        found = entry.examine(str(leaf), places, Hasher(), listed=True, whole=True, own=own)
        said += [found.reason] if isinstance(found, entry.Refused) else []
    for each in inventory.entries(str(tmp_path / "layer/v1")):
        said.append(inventory.details(each).damaged)
    said += [fault.reason for _, fault in inventory.verify(str(tmp_path / "layer/v1")) if fault]
    report_cache._build(str(leaf))
    try:
        bundle.write_bundle(str(tmp_path / "layer"), str(tmp_path / "ops.bundle"))
    except StoreError as error:
        said.append(str(error))
    return said


def test_manifest_with_any_type_in_any_place_is_refused_by_its_name(
    request: pytest.FixtureRequest, leaf: Path, tmp_path: Path
) -> None:
    whole = read(leaf)
    tried, step = 0, 1 if fault_rows.whole(request.config) else 4
    for way, value in itertools.islice(itertools.product(places(whole), _VALUES), 0, None, step):
        if way == ("schema",):
            continue
        old, manifest = changed(whole, way, value)
        if old == value:
            continue
        (leaf / entry.MANIFEST).write_bytes(entry.write_manifest(manifest))
        said = refusals(leaf, tmp_path)
        tried += 1
        context = f"{way} = {json.dumps(value)}: {said}"
        assert not any(map(_RAW.search, said)), context
        if not fits(old, value, way):
            assert any(f"{entry.MANIFEST}: " in each for each in said), context
    assert tried > 500 / step


def test_manifest_without_a_part_is_refused_by_its_name(leaf: Path, tmp_path: Path) -> None:
    whole = read(leaf)
    for part in ("spec", "target", "needs", "deps", "payload", "size", "sha256"):
        manifest = {name: value for name, value in whole.items() if name != part}
        (leaf / entry.MANIFEST).write_bytes(entry.write_manifest(manifest))
        said = refusals(leaf, tmp_path)
        assert not any(map(_RAW.search, said)), said
        assert any(f"{entry.MANIFEST}: '{part}' is missing" in each for each in said), said


@pytest.mark.parametrize(
    ("way", "value", "told"),
    [
        (("needs", "sonames"), [6], "manifest.json: needs.sonames[0] is 6, not a string"),
        (("size",), "big", "manifest.json: size is 'big', not a number"),
        (("target",), 6, "manifest.json: target is 6, not an object"),
        (("deps", "own"), [["src"]], "manifest.json: deps.own[0] has 1 parts, not 3"),
    ],
)
def test_refusal_says_what_is_wrong_and_where(
    leaf: Path, tmp_path: Path, way: tuple[Any, ...], value: Any, told: str
) -> None:
    _, manifest = changed(read(leaf), way, value)
    (leaf / entry.MANIFEST).write_bytes(entry.write_manifest(manifest))
    assert f"damaged: {told}" in refusals(leaf, tmp_path)
