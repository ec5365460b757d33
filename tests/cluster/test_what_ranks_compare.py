"""Ranks agree on what an op computes in Python as well as on its library: whatever rank 1 declares
otherwise is an error that names it on both ranks."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from ranks import HERE, Node
from sample import forks

from opkiln.base.model import REGISTERED, Op, OpSpec, Registration
from opkiln.cluster.facts import NOT_COMPARED

pytestmark = [pytest.mark.slow, pytest.mark.timed]

# A function of every kind that an author can declare. Each <kind> is a 2; in the module that is
# named after it, a 3 on rank 1.
TEXT = """
import opkiln
import torch
from torch import Tensor

SOURCE = "// <source>"

@opkiln.op(source=SOURCE, variants={"SIZE": (2, 3)}, tune={"BLOCK": (2, 3)})
def scaled(x: Tensor, factor: float = <schema>) -> Tensor:
    return x * factor * <reference>

@scaled.fake
def _(x, factor=2.0):
    return x.new_empty(<fake> * x.shape[0])

@scaled.backward
def _(grad, x, factor):
    return grad * <backward>, None

@scaled.vmap
def _(info, dims, x, factor):
    return x * <vmap>, 0

@scaled.variant
def _(x, factor):
    return {"SIZE": <variant>}

@scaled.tune_key
def _(x, factor):
    return <tune_key>

class Built(opkiln.OpBuilder):
    NAME = "built"

    def sources(self):
        return ["value.cpp"]

@opkiln.library(Built).op()
def built(x: Tensor) -> Tensor:
    return x * <reference of a builder>

OPS = [scaled, Built]
"""
AGAIN = """
import opkiln
from torch import Tensor

@opkiln.op(source="// none")
def plain(x: Tensor) -> Tensor:
    return x * 2

@plain.backward
def _(grad, x):
    return grad * 2
"""
KINDS = re.findall("<(.*?)>", TEXT)
FACTS = {
    "source": "declaration", "schema": "declaration", "reference": "reference",
    "fake": "shape function", "backward": "gradient", "vmap": "vmap function",
    "variant": "variant function", "tune_key": "tune_key function", "functions": "reference",
}  # fmt: skip


def module_of(kind: str) -> str:
    return kind.replace(" ", "_")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What came of each case on two ranks, whose packages lie in directories of their own."""
    where = tmp_path_factory.mktemp("nodes")
    nodes = [Node(where / "a", torch=True), Node(where / "another", torch=True)]
    modules = ["same", *map(module_of, KINDS)]
    given = json.dumps({"store": str(where / "store"), "modules": modules})
    ranks = []
    for rank, node in enumerate(nodes):
        (node.path / "again.py").write_text(AGAIN)
        for name in modules:
            text = TEXT
            for kind in KINDS:
                changed = rank == 1 and name == module_of(kind)
                text = text.replace(f"<{kind}>", "3" if changed else "2")
            (node.path / f"{name}.py").write_text(text)
        ranks.append(
            forks.Fork(
                [str(HERE / "compared_rank.py"), given], cwd=node.path,
                env={**node.environment(), "RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        ended = [each.communicate(timeout=240) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], ended
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def require_refused(said: list[dict[str, str]], case: str, fact: str) -> None:
    for each in said:
        assert "rank 1 (host " in each[case], each[case]
        assert f"has another {fact}" in each[case]
        assert "hint: " in each[case]


def test_every_kind_of_registered_function_is_tried() -> None:
    assert {*REGISTERED} <= {kind.removesuffix(" of a builder") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_rank_that_declares_another_function_is_refused(
    kind: str, said: list[dict[str, str]]
) -> None:
    require_refused(said, module_of(kind), FACTS[kind.partition(" ")[0]])


@pytest.mark.parametrize(
    "field",
    [f"{name}.{field}" for name, record in
     (("", Op), ("spec", OpSpec), ("registration", Registration))
     for field in record._fields if field not in ("spec", "registration")],
)  # fmt: skip
def test_rank_whose_declaration_has_another_field_is_refused(
    field: str, said: list[dict[str, str]]
) -> None:
    _, _, name = field.partition(".")
    if name in ("root", "declared_by", "overloads", "rule", "asked"):
        assert name in NOT_COMPARED
        assert [each[field] for each in said] == ["", ""]
    elif name == "name":
        assert all("rank 1 (host " in each[field] for each in said)
    else:
        require_refused(said, field, FACTS.get(name, "declaration"))


def test_ranks_with_the_same_program_agree(said: list[dict[str, str]]) -> None:
    assert [each["same"] for each in said] == ["", ""]


def test_each_rank_lists_its_own_parts_of_what_differs(said: list[dict[str, str]]) -> None:
    listed = [
        dict(each.split(" ") for each in one["fake"].split("parts on this rank: ")[1]
             .partition("\n")[0].split(", ")[1:])
        for one in said
    ]  # fmt: skip
    assert listed[0].keys() == listed[1].keys() == {"fake._"}
    assert listed[0] != listed[1]


def test_op_that_is_declared_again_is_the_agreed_one_only_with_the_same_functions(
    said: list[dict[str, str]],
) -> None:
    for each in said:
        assert (each["again"], each["declared again"]) == ("", "")
        assert "the ranks agreed on another op plain" in each["declared otherwise"]
        assert "declared anew since then, with another gradient" in each["declared otherwise"]
