"""Layers that were built elsewhere: which of them serve, in which order, and what is refused.

The layers here are listed in OPKILN_STORE_LAYERS, unless a test says otherwise.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample.package import rest, settle
from sample.shipped import Shipped, described, rewrite

from opkiln.base.model import ABI_TORCH
from opkiln.decision import archs
from opkiln.decision.archs import target_machine
from opkiln.decision.terms import SHIP, Build, Request
from opkiln.loading import loader
from opkiln.loading.explain import explain
from opkiln.loading.loader import look
from opkiln.machine.toolchain import choice, torch_sdk
from opkiln.settings import override
from opkiln.store import key
from opkiln.store.bundle import unpack, write_bundle
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from sample.package import Package

    from opkiln.decision.terms import Candidate


@pytest.fixture
def shipped(plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    return Shipped(plain, "csrc/add.cpp", tmp_path, monkeypatch)


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    return tmp_path / "layer"


def served_from(shipped: Shipped) -> str:
    artifact = shipped.loaded.artifact
    assert artifact is not None
    return artifact.path


def refused(shipped: Shipped, layer: Path, reason: str) -> None:
    """`explain` and the load say why, nothing of the layer is opened, and a build serves."""
    with override(store_layers=(str(layer),)):
        assert f"layer     refused  {reason}" in shipped.explained()
        assert shipped.load().add(1, 2) == 103
    assert shipped.origin == "built"
    assert f"layer     refused  {reason}" in shipped.trace
    assert [path for path in shipped.opened if path.startswith(str(layer))] == []


# Headers outside of the package


@pytest.fixture
def header(plain: Package, tmp_path: Path) -> Path:
    """What ``add`` adds, in a directory of the machine that built it, outside of the package."""
    outside = tmp_path / "theirs" / "value.h"
    outside.parent.mkdir()
    outside.write_text("constexpr int kShared = 100;\n")
    (plain / "csrc/include/shared.h").write_text("#pragma once\n#include <value.h>\n")
    plain.edit("op.py", '"csrc/include"]', f'"csrc/include", "{outside.parent}"]')
    settle(outside)
    return outside


def test_a_header_outside_of_the_package_that_was_edited_is_built_with_as_it_is_now(
    header: Path, shipped: Shipped, layer: Path
) -> None:
    shipped.build(layer)
    with override(store_layers=(str(layer),)):
        assert shipped.load().add(1, 2) == 103
        assert served_from(shipped).startswith(str(layer))
        header.write_text("constexpr int kShared = 200;\n")
        rest()
        assert shipped.load().add(1, 2) == 203
    assert shipped.origin == "built"
    assert f"layer     refused  {header} changed" in shipped.trace


def test_a_header_outside_of_the_package_that_is_not_here_is_not_missed(
    header: Path, shipped: Shipped, layer: Path
) -> None:
    shipped.build(layer)
    header.unlink()
    with override(store_layers=(str(layer),), mode="cached"):
        assert shipped.load().add(1, 2) == 103
    assert served_from(shipped).startswith(str(layer))


def test_a_package_that_carries_its_op_is_not_served_with_an_edited_header_from_outside_of_it(
    header: Path, shipped: Shipped
) -> None:
    shipped.build()
    header.write_text("constexpr int kShared = 200;\n")
    rest()
    assert shipped.load().add(1, 2) == 203
    assert f"prebuilt  refused  {header} changed" in shipped.trace


# Who may write there


@pytest.mark.parametrize("part", ["intent", "build"])
def test_a_layer_in_which_everybody_can_put_entries_is_refused(
    shipped: Shipped, layer: Path, part: str
) -> None:
    leaf = shipped.build(layer)
    path = leaf.parent if part == "build" else leaf.parent.parent
    path.chmod(0o777)
    refused(shipped, layer, f"{path} is writable by everybody")


def test_one_directory_that_everybody_can_write_to_does_not_cost_the_others(
    shipped: Shipped, layer: Path
) -> None:
    bad = shipped.build(layer)
    good = shipped.build(layer, debug=True)
    bad.parent.parent.chmod(0o777)
    with override(store_layers=(str(layer),), debug=True):
        shipped.load()
    assert served_from(shipped) == str(good / "plain.so")


# The order of layers


@pytest.mark.parametrize("names", [("a", "z"), ("z", "a")])
def test_of_two_layers_with_equally_good_entries_the_first_listed_serves(
    shipped: Shipped, tmp_path: Path, names: tuple[str, str]
) -> None:
    layers = [tmp_path / name for name in names]
    first, _ = (shipped.build(each) for each in layers)
    with override(store_layers=tuple(map(str, layers))):
        shipped.load()
    assert served_from(shipped) == str(first / "plain.so")


def test_a_bundle_that_is_listed_before_a_directory_serves_before_it(
    shipped: Shipped, layer: Path, tmp_path: Path
) -> None:
    shipped.build(layer)
    bundle = tmp_path / "ops.bundle"
    write_bundle(str(layer), str(bundle))
    with override(store_layers=(str(bundle), str(layer))):
        shipped.load()
    assert f"taken    its sources are today's, and its code for {made_for(layer)}" in shipped.trace
    assert f"{bundle}!v1/ops/" in shipped.trace
    assert served_from(shipped).startswith("/proc/")


def made_for(layer: Path) -> str:
    (manifest,) = layer.rglob("manifest.json")
    target = described(manifest.parent)["target"]
    return "+".join((target["cpu"], *target["cpu_features"]))


# Manifests of another make


def _without_sonames(manifest: dict[str, Any]) -> None:
    del manifest["needs"]["sonames"]


def _with_a_number_for_a_symbol(manifest: dict[str, Any]) -> None:
    manifest["needs"].update(sonames=["libc.so.6"], symbols=[["libc.so.6", 5, "GLIBC_2.2.5"]])


def _with_a_number_for_a_library(manifest: dict[str, Any]) -> None:
    manifest["needs"]["sonames"] = [6]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_sonames, "damaged: manifest.json: 'sonames' is missing"),
        (
            _with_a_number_for_a_symbol,
            "damaged: manifest.json: needs.symbols[0][1] is 5, not a string",
        ),
        (
            _with_a_number_for_a_library,
            "damaged: manifest.json: needs.sonames[0] is 6, not a string",
        ),
    ],
)
def test_a_manifest_that_does_not_say_what_is_needed_is_refused_and_the_next_layer_serves(
    shipped: Shipped,
    layer: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    reason: str,
) -> None:
    rewrite(shipped.build(layer), change)
    refused(shipped, layer, reason)
    good = shipped.build(tmp_path / "next")
    with override(store_layers=(str(layer), str(tmp_path / "next")), mode="cached",
                  cache_dir=str(tmp_path / "empty")):  # fmt: skip
        shipped.load()
    assert served_from(shipped) == str(good / "plain.so")


@pytest.fixture
def device(
    package: Callable[..., Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Shipped:
    return Shipped(package("device"), "answer.cpp", tmp_path, monkeypatch)


CUDA = {"_asked_backend": "cuda"}


def as_for_cuda(device: Shipped, layer: Path, *made: str, images: tuple[str, ...]) -> Path:
    """Without nvcc: the op's version for CPUs, in an entry that says it has code for GPUs."""
    spec = device.package.builder(**CUDA).op().spec
    leaf = device.build(layer, backend="cpu")

    def change(manifest: dict[str, Any]) -> None:
        manifest["spec"] = key.spec_key(spec)
        manifest["target"].update(backend="cuda", archs=list(made))
        manifest["needs"]["images"] = list(images)

    rewrite(leaf, change)
    return leaf


@pytest.mark.parametrize(
    ("arch", "image"), [("99.9z", "sm_999"), ("12.0q+PTX", "sm_120"), ("9.0", "gfx942")]
)
def test_gpus_that_this_version_does_not_know_are_refused_and_the_next_layer_serves(
    device: Shipped, tmp_path: Path, arch: str, image: str
) -> None:
    strange, good = tmp_path / "strange", tmp_path / "good"
    as_for_cuda(device, strange, arch, images=(image,))
    leaf = as_for_cuda(device, good, "9.0", images=("sm_90",))
    with override(store_layers=(str(strange), str(good)), cuda_arch_list="9.0", mode="cached"):
        assert device.load(**CUDA).answer() == 42
    assert served_from(device) == str(leaf / "device.so")
    assert f"its code is for {arch}, which this opkiln does not know" in device.trace


# PTX that was asked for


def test_a_listed_layer_without_the_ptx_that_was_named_is_no_build_for_elsewhere(
    device: Shipped, layer: Path
) -> None:
    as_for_cuda(device, layer, "9.0a", images=("sm_90a",))
    builder = device.package.builder()
    builder.ask_for("cuda", "9.0a+PTX")
    op = builder.op()
    with override(store_layers=(str(layer),)):
        outcome = look(Request(op, SHIP))
    assert isinstance(outcome, Build)
    assert not [each for each in outcome.trace.candidates if each.verdict == "taken"]


def test_code_without_ptx_is_no_answer_to_a_list_that_names_ptx(
    device: Shipped, layer: Path
) -> None:
    as_for_cuda(device, layer, "9.0a", images=("sm_90a",))
    with override(store_layers=(str(layer),), cuda_arch_list="9.0a+PTX"):
        said = device.explained(**CUDA)
    assert "refused  its code is for 9.0a, which does not run on 9.0a+PTX" in said


def test_named_ptx_is_had_where_a_library_has_any(device: Shipped) -> None:
    op = device.package.builder(**CUDA).op()
    with override(cuda_arch_list="9.0a+PTX"):
        needs = archs.find_wanted(op)
    assert archs.way_of("cuda", needs, ("9.0a",), ("sm_90a",)) == ("", "9.0a+PTX")
    has = archs.way_of("cuda", needs, ("9.0a+PTX",), ("sm_90a", "compute_90a"))
    assert has == ("exact", "9.0a+PTX")
    with override(cuda_arch_list="9.0a"):
        needs = archs.find_wanted(op)
    assert archs.way_of("cuda", needs, ("9.0a",), ("sm_90a",)) == ("exact", "9.0a")


# Layers that are none


def decided(shipped: Shipped, *layers: Path) -> list[Candidate]:
    """What `explain` decides about these layers themselves."""
    op = shipped.package.builder().op()
    loader.here.ops.pop(op.name, None)
    with override(store_layers=tuple(map(str, layers))):
        found = explain(op).candidates
    return [each for each in found if each.subject in map(str, layers)]


def test_a_listed_layer_that_is_not_there_is_told(shipped: Shipped, tmp_path: Path) -> None:
    (told,) = decided(shipped, tmp_path / "nothing")
    assert (told.resort, told.verdict) == ("layer", "none")
    assert told.reason == "OPKILN_STORE_LAYERS names it, and it does not exist"


def test_a_listed_directory_that_is_no_layer_is_told(shipped: Shipped, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (told,) = decided(shipped, tmp_path / "empty")
    assert (told.resort, told.verdict) == ("layer", "none")
    assert told.reason == "OPKILN_STORE_LAYERS names it, and it is not a layer: it has no v1"


def test_a_layer_that_is_none_does_not_hide_the_next(shipped: Shipped, tmp_path: Path) -> None:
    leaf = shipped.build(tmp_path / "layer")
    layers = (str(tmp_path / "nothing"), str(tmp_path / "layer"))
    with override(store_layers=layers, mode="cached"):
        shipped.load()
    assert served_from(shipped) == str(leaf / "plain.so")


# Python's releases


@pytest.mark.parametrize(("other", "serves"), [("patch", True), ("minor", False)])
def test_what_another_patch_release_of_python_built_serves_and_another_minors_does_not(
    shipped: Shipped, monkeypatch: pytest.MonkeyPatch, other: str, serves: bool
) -> None:
    if torch_sdk.find() is None:
        pytest.skip("torch is not installed")
    monkeypatch.setattr(type(shipped.package.builder()), "ABI", ABI_TORCH)
    leaf = shipped.build()
    tag = described(leaf)["target"]["abi_tag"]
    before, python, _ = tag.rpartition("cpython-")
    release = torch_sdk.python_tag().removeprefix("cpython-")
    number, _, version = release.partition("-")
    major, minor, _ = version.split(".")
    if other == "patch":
        changed = f"{number}-{major}.{minor}.99"
    else:
        changed = f"{number.replace(minor, '99')}-{major}.99.0"
    assert changed != release
    renamed = f"{before}{python}{changed}"
    rewrite(leaf, lambda manifest: manifest["target"].update(abi_tag=renamed))
    said = shipped.explained()
    assert said.startswith("plain: cached\n") == serves
    assert (f"prebuilt  refused  it is built for {renamed}, and here is " in said) != serves


def test_a_file_where_a_header_outside_had_its_directory_is_as_good_as_no_header(
    header: Path, shipped: Shipped, layer: Path
) -> None:
    shipped.build(layer)
    shutil.rmtree(header.parent)
    header.parent.touch()
    with override(store_layers=(str(layer),), mode="cached"):
        assert shipped.load().add(1, 2) == 103
    assert served_from(shipped).startswith(str(layer))


def test_explain_names_the_header_outside_that_changed(
    header: Path, shipped: Shipped, layer: Path
) -> None:
    shipped.build(layer)
    header.write_text("constexpr int kShared = 200;\n")
    rest()
    with override(store_layers=(str(layer),)):
        said = shipped.explained()
    assert "cannot be read" not in said
    assert f"{header} changed" in said.partition("changed since it was last built:")[2]


def test_an_imported_entry_with_a_header_outside_is_not_called_damaged(
    header: Path, shipped: Shipped, layer: Path, tmp_path: Path, cache: Path
) -> None:
    shipped.build(layer)
    bundle = tmp_path / "ops.bundle"
    write_bundle(str(layer), str(bundle))
    unpack(str(bundle), str(cache / "v1"))
    choice.choose(Store().memory, "cpu", target_machine())
    with override(mode="cached"):
        assert shipped.load().add(1, 2) == 103
    assert "damaged" not in shipped.trace
