"""The bill of materials: CycloneDX as its schema wants it, and the same for the same layer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sample.prebuilt import FULL, SYSTEM, add, linked, made_with

from opkiln.ship.wheel import sbom
from opkiln.store.layer import entries

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    cuda = made_with("-L{toolkit}/lib", "-lcudart_static", gcc="g++ 12.2.0", nvcc="13.0")
    add(tmp_path, "alpha")
    add(tmp_path, "beta", backend="cuda", archs=["8.0", "9.0a"], inputs=cuda)
    return tmp_path


def document(layer: Path) -> dict[str, Any]:
    made = sbom(entries(str(layer)), "below", name="Demo_Ops", version="1.0+cu130")
    found: dict[str, Any] = json.loads(made)
    return found


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in found["components"]}


def uses(found: dict[str, Any], ref: str) -> list[str]:
    (entry,) = [each for each in found["dependencies"] if each["ref"] == ref]
    named = {each["bom-ref"]: each["name"] for each in found["components"]}
    return sorted(named[used] for used in entry.get("dependsOn", ()))


def test_it_has_the_shape_of_cyclonedx_1_6(layer: Path) -> None:
    found = document(layer)
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/demo-ops@1.0%2Bcu130"
    assert found["metadata"]["tools"]["components"][0]["name"] == "opkiln"
    refs = [each["bom-ref"] for each in found["components"]]
    refs.append(found["metadata"]["component"]["bom-ref"])
    assert len(set(refs)) == len(refs)
    for each in found["components"]:
        assert each["type"] in {"library", "application"}
        assert each["name"]
        assert all(set(told) == {"name", "value"} for told in each["properties"])
    assert sorted(each["ref"] for each in found["dependencies"]) == sorted(refs)
    for each in found["dependencies"]:
        assert set(each.get("dependsOn", ())) <= set(refs)


def test_each_library_has_its_digest_and_what_it_is_for(layer: Path) -> None:
    for leaf in entries(str(layer)):
        each = by_name(document(layer))[leaf.manifest["op"]]
        assert each["hashes"] == [{"alg": "SHA-256", "content": leaf.manifest["sha256"]}]
        told = {one["name"]: one["value"] for one in each["properties"]}
        assert told["opkiln:path"] == f"below/{leaf.place}/{leaf.manifest['payload']}"
        assert told["opkiln:backend"] == leaf.manifest["target"]["backend"]
    told = {one["name"]: one["value"] for one in by_name(document(layer))["beta"]["properties"]}
    assert told["opkiln:archs"] == "8.0;9.0a"


def test_what_went_into_a_library_is_listed_with_it(layer: Path) -> None:
    found = document(layer)
    parts = by_name(found)
    assert uses(found, parts["alpha"]["bom-ref"]) == ["gcc", "torch"]
    assert uses(found, parts["beta"]["bom-ref"]) == ["cudart_static", "gcc", "nvcc", "torch"]
    assert uses(found, found["metadata"]["component"]["bom-ref"]) == ["alpha", "beta"]
    assert parts["cudart_static"]["version"] == "13.0"
    assert (parts["gcc"]["version"], parts["gcc"]["scope"]) == ("g++ 12.2.0", "excluded")
    assert parts["nvcc"]["version"] == "13.0"


def test_a_stable_op_says_which_torchs_headers_it_saw_only_where_that_was_recorded(
    layer: Path,
) -> None:
    assert "version" not in by_name(document(layer))["torch"]
    seen = made_with() | {"torch": {"version": "2.13.0+cpu"}}
    add(layer, "gamma", inputs=seen)
    versions = {each.get("version") for each in document(layer)["components"]
                if each["name"] == "torch"}  # fmt: skip
    assert versions == {None, "2.13.0+cpu"}


def test_a_full_abi_op_names_torchs_version_and_one_without_torch_none(tmp_path: Path) -> None:
    add(tmp_path / "full", "full", linked(*SYSTEM), abi_tag=FULL)
    torch = by_name(document(tmp_path / "full"))["torch"]
    assert (torch["version"], torch["purl"]) == ("2.13.0+cpu", "pkg:pypi/torch@2.13.0%2Bcpu")
    add(tmp_path / "none", "none", linked(*SYSTEM, needed=()), abi_tag="none")
    assert "torch" not in by_name(document(tmp_path / "none"))


def test_the_same_layer_gives_the_same_bytes_with_no_time_and_no_serial_number(
    layer: Path,
) -> None:
    found = entries(str(layer))
    first = sbom(found, "below", name="demo", version="1")
    assert sbom(reversed(found), "below", name="demo", version="1") == first
    assert not {"serialNumber", "timestamp"} & set(json.loads(first))
    assert "timestamp" not in json.loads(first)["metadata"]
