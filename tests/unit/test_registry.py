"""ALL_OPS: bundled ops and those of installed packages, looked up lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sample import child

import opkiln
from opkiln.builder import OpBuilder, deepspeed_names, registry
from opkiln.errors import SpecError, UnknownOp
from opkiln.ship import selection

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package


def install(where: Path, *entries: str, name: str = "sample-dist") -> None:
    """What an installer leaves of a distribution with entry points."""
    info = where / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opkiln.ops]\n" + "\n".join(entries) + "\n")


def test_bundled_ops_are_the_folders_with_a_builder() -> None:
    assert "cpu_adam" in registry.bundled_ops()
    assert set(registry.bundled_ops()) <= set(opkiln.ALL_OPS)
    for name in registry.bundled_ops():
        assert opkiln.get_builder(name).name == name


def test_a_builder_is_an_instance_of_its_own_each_time() -> None:
    one, other = opkiln.get_builder("cpu_adam"), opkiln.get_builder("cpu_adam")
    assert one is not other
    assert isinstance(one, opkiln.ALL_OPS["cpu_adam"])


@pytest.mark.parametrize("name", ["no_such_op", "../cpu_adam", "cpu_adam/../cpu_adam", "", "a b"])
def test_an_unknown_op_is_an_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownOp) as caught:
        opkiln.get_builder(name)
    assert repr(name) in caught.value.what
    assert "cpu_adam" in caught.value.why
    assert name not in opkiln.ALL_OPS


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cpu_adm", "cpu_adam"),
        ("FusedAdam", "fused_adam"),
        ("cpu-adam", "cpu_adam"),
        ("opkiln:quantiser", "quantizer"),
    ],
)
@pytest.mark.parametrize("ask", [opkiln.get_builder, opkiln.explain, opkiln.ALL_OPS.__getitem__])
def test_unknown_op_is_asked_whether_a_close_name_was_meant(
    ask: Callable[[str], object], name: str, meant: str
) -> None:
    with pytest.raises(UnknownOp) as caught:
        ask(name)
    assert caught.value.hint.startswith(f"did you mean {meant}")


def test_unknown_op_with_no_close_name_is_not_asked() -> None:
    with pytest.raises(UnknownOp) as caught:
        opkiln.get_builder("zzzzzz")
    assert caught.value.hint == "opkiln report"


def test_another_package_adds_ops_by_entry_point(plain: Package) -> None:
    install(plain.where, f"their_op = {plain.name}.op:PlainBuilder")
    builder = opkiln.get_builder("their_op")
    assert builder.distribution == plain.name
    assert "their_op" in list(opkiln.ALL_OPS)
    assert len(opkiln.ALL_OPS) == len(list(opkiln.ALL_OPS))


def test_an_entry_point_that_is_no_builder_is_refused_by_name(plain: Package) -> None:
    install(plain.where, "odd_op = json:dumps")
    with pytest.raises(SpecError, match="odd_op = json:dumps is not an OpBuilder"):
        opkiln.get_builder("odd_op")


def test_a_bundled_op_cannot_be_replaced_by_an_entry_point(plain: Package) -> None:
    install(plain.where, f"cpu_adam = {plain.name}.op:PlainBuilder")
    assert opkiln.get_builder("cpu_adam").distribution == "opkiln"
    assert list(opkiln.ALL_OPS).count("cpu_adam") == 1


def test_an_op_with_the_name_of_another_is_found_by_its_distribution(plain: Package) -> None:
    install(plain.where, f"cpu_adam = {plain.name}.op:PlainBuilder")
    install(plain.where, "their_op = json:dumps", name="another")
    assert opkiln.get_builder("sample-dist:cpu_adam").distribution == plain.name
    assert opkiln.get_builder("opkiln:cpu_adam").distribution == "opkiln"
    with pytest.raises(UnknownOp, match="no op 'sample-dist:their_op'"):
        opkiln.get_builder("sample-dist:their_op")


def test_every_op_of_one_name_is_listed_and_found_by_what_it_is_listed_as(
    package: Callable[..., Package],
) -> None:
    first, second = package("plain"), package("plain")
    install(first.where, f"same = {first.name}.op:PlainBuilder", name="a-dist")
    install(first.where, f"same = {second.name}.op:PlainBuilder", name="B.dist")
    names = [name for name in opkiln.ALL_OPS if name.endswith("same")]
    assert len(names) == 2
    assert names[0] == "same"
    assert names[1] in ("a-dist:same", "B.dist:same"), "the one that is found second"
    found = {opkiln.get_builder(name).distribution for name in names}
    assert found == {first.name, second.name}
    assert len(opkiln.ALL_OPS) == len(list(opkiln.ALL_OPS))


@pytest.mark.parametrize("owner", ["B.dist", "b-dist", "b_dist", "B_-.Dist"])
def test_a_distribution_may_be_spelled_as_an_installer_takes_it(plain: Package, owner: str) -> None:
    install(plain.where, f"their_op = {plain.name}.op:PlainBuilder", name="B.dist")
    assert opkiln.get_builder(f"{owner}:their_op").distribution == plain.name
    assert opkiln.get_builder(f"{plain.name}:their_op").distribution == plain.name
    assert f"{owner}2:their_op" not in opkiln.ALL_OPS
    assert opkiln.get_builder("OpKiln:cpu_adam").distribution == "opkiln"


def test_looking_up_a_bundled_op_reads_no_entry_points_and_imports_no_torch() -> None:
    out = child.run("""
        import sys, opkiln
        opkiln.get_builder("cpu_adam").spec()
        print("importlib.metadata" in sys.modules, "torch" in sys.modules)
    """, bare=False, forked=False)  # fmt: skip
    assert out.split() == ["False", "False"]


def test_a_builder_without_sources_says_so() -> None:
    class Empty(OpBuilder):
        NAME = "empty"

    with pytest.raises(SpecError, match="Empty declares no sources"):
        Empty().spec()


def test_ops_of_one_name_in_two_packages_are_two_ops(package: Callable[..., Package]) -> None:
    specs = [package("plain").builder().spec() for _ in range(2)]
    assert specs[0].name == specs[1].name
    assert specs[0].distribution != specs[1].distribution


@pytest.mark.parametrize("name", deepspeed_names.ELSEWHERE)
def test_a_name_of_deepspeeds_leads_to_the_op_that_has_its_functions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = deepspeed_names.ELSEWHERE[name]
    assert registry.get_builder(name).name == registry.get_builder(f"opkiln:{name}").name == here
    assert name not in list(registry.ALL_OPS)
    monkeypatch.setenv(f"DS_BUILD_{name.upper()}", "1")
    assert registry.get_builder(name).build_wanted()
    chosen = {each.op.name: each for each in selection.choose(selection.bundled_ops())}
    assert {op for op, each in chosen.items() if each.wanted} == {here}


@pytest.mark.parametrize("name", deepspeed_names.NOT_HERE)
def test_an_op_of_deepspeeds_that_is_not_here_says_why(name: str) -> None:
    with pytest.raises(UnknownOp, match="is not here") as wrong:
        registry.get_builder(name)
    assert wrong.value.why == deepspeed_names.NOT_HERE[name]
