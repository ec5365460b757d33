"""docs/reference/formats.md names every field and limit that the code has, and no others."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from sample import independent_reader
from sample.formats_page import PAGE, fields, section, table

from opkiln import __version__, settings
from opkiln.base import digest
from opkiln.base.build_model import Target
from opkiln.base.model import OpSpec
from opkiln.remote import lockfile, tier
from opkiln.store import archive, entry, key, signatures, tuned, zip_format

TITLES = ("Manifest", "Target", "Needs", "Dependencies", "Sidecar", "Index", "Signatures")


def paths(parts: dict[str, Any], above: str = "") -> set[str]:
    """Every field of a shape, with the names of those around it."""
    found = set()
    for name, part in parts.items():
        found.add(above + name)
        if isinstance(part, dict):
            found |= paths(part, f"{above}{name}.")
    return found


def test_every_field_that_is_checked_is_on_the_page_and_the_other_way_round() -> None:
    named = {name for title in TITLES for name in fields(title)}
    assert named - {"schema", "version"} == paths(entry._MANIFEST)


def in_words(part: Any) -> str:
    """The type of a field as the page writes it."""
    if isinstance(part, entry.Row):
        columns = [*map(in_words, part.parts), *(["integers…"] if part.rest is int else [])]
        return f"[{', '.join(columns)}]"
    if isinstance(part, list):
        inner = in_words(part[0])
        return (
            f"list of lists of {inner[8:]}" if inner.startswith("list of ") else f"list of {inner}"
        )
    if isinstance(part, (dict, entry.Named)):
        return "object"
    return {str: "text", int: "integer", bool: "boolean", (int, float): "number"}[part]


@pytest.mark.parametrize("title", TITLES)
def test_types_on_the_page_are_those_that_are_checked(title: str) -> None:
    for name, told, *_ in table(title):
        part: Any = {**entry._MANIFEST, "schema": int, "version": int}
        for each in name.strip("`").split("."):
            part = part[each]
        assert told == in_words(part), name


def test_the_order_of_the_declaration_and_the_target_is_that_of_the_key() -> None:
    told = tuple(re.findall(r"`(\w+)`", section("The keys").partition("in this order:")[2]))
    declared = tuple(name for name in OpSpec._fields if name not in key.UNKEYED)
    assert told[: len(declared)] == declared == independent_reader.DECLARATION
    target = tuple(name.removeprefix("target.") for name in fields("Target"))
    assert target == Target._fields == independent_reader.TARGET


def test_other_files_have_the_fields_on_the_page() -> None:
    assert tuple(fields("Lock file", "| Field")) == lockfile.LockRow._fields
    assert fields("Remote tier") == ["schema", *tier.Publication._fields]
    choice = tuned.TunedChoice(
        tuned.Question("d", "o", "m", "s", "v", ("c",), "x"), "c", {"c": 1.0}
    )
    assert sorted(fields("Tuned choices")) == list(json.loads(tuned.to_text(choice)))


def test_names_are_made_as_the_page_says() -> None:
    question = tuned.Question("d", "o", "m", "s", "v", ("c", "e"), "x")
    name = independent_reader.key("tuned", ["d", "o", "m", "s", "v", ["c", "e"], "x"])
    assert tuned._name(question) == f"tuned/d/o/{name}.json"
    sources = [("a.cpp", "1" * 64), ("b.cpp", "2" * 64)]
    told = ("v1", __version__, "d", "an_op", "3" * 40, sources)
    published = lockfile.artifact_name("d", "an_op", "3" * 40, reversed(sources))
    assert published == f"an_op-{independent_reader.key('remote', told)}"


def test_versions_on_the_page_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"schema {settings.SCHEMA} of the manifests, layout `{settings.LAYOUT}`" in text
    assert f"whose `schema` is not {settings.SCHEMA}." in text


def test_limits_on_the_page_are_those_of_the_code() -> None:
    assert {what: int(limit) for what, limit in table("Limits")} == {
        "a payload": digest.LARGEST,
        "a manifest, sidecar or receipt": digest.LARGEST_RECORD,
        "the end of a bundle's last entry": zip_format.LARGEST,
        "members of a bundle": zip_format.MOST_MEMBERS,
        "the index of a bundle": archive._LARGEST_INDEX,
        "a manifest or sidecar in a bundle": archive._LARGEST_READ,
        "the signatures of a bundle": signatures.LARGEST,
        "the number of signatures of a bundle": signatures.MOST,
        "a file of trusted keys": signatures._LARGEST_KEYS,
        "a lock file": lockfile._LARGEST,
        "a record or manifest of a remote tier": tier.LARGEST_RECORD,
        "a tuned choice": tuned._LARGEST,
    }


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -12, "", "é\udcff", (), ("a.h",), (("a", 1), ["b"], (None, False))],
)
def test_the_encoding_on_the_page_is_that_of_the_keys(value: object) -> None:
    assert independent_reader.encode(value) == digest.encode(value)
    assert independent_reader.key("deps", value) == digest.key("deps", value)


def test_the_example_of_the_encoding_is_right() -> None:
    example = re.search(r'`encode\((\(1, "listing".*?\))\)` is `(.*)`', PAGE)
    assert example is not None
    assert example.group(2).encode() == digest.encode((1, "listing", ("a.h",)))
