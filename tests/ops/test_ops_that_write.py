"""One rule for every function of the catalogue that writes to an argument: not to a tensor that
autograd differentiates, and not to one whose elements share memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from opkiln import get_builder
from opkiln.builder import registry
from opkiln.settings import override

ZEROS = torch.zeros(4, 4)
DUMMIES = {"int": 1, "SymInt": 1, "float": 1.0, "bool": False, "str": "x"}


def writing() -> dict[str, str]:
    """The functions that write to an argument, and a library that has each."""
    found: dict[str, str] = {}
    for op in registry.bundled_ops():
        for each in registry.ALL_OPS[op].variants() or (registry.ALL_OPS[op],):
            names = (schema.partition("(")[0] for schema in each.FUNCTIONS.schemas if "!" in schema)
            found |= dict.fromkeys(names, each.NAME)
    return found


def dummy(kind: str, value: Tensor) -> Any:
    """Something of a type of torch's. What it is does not matter: the rule comes first."""
    if "Tensor" in kind:
        return [value] if kind.startswith("List") else value
    return None if kind.startswith("Optional") else DUMMIES.get(kind, [])


BAD = {
    "a leaf": (lambda: torch.zeros(4, 4, requires_grad=True), "requires a gradient"),
    "part of a graph": (lambda: torch.zeros(4, 4, requires_grad=True) * 2, "requires a gradient"),
    "a view of a leaf": (lambda: torch.zeros(8, 4, requires_grad=True)[2:6], "requires a gradient"),
    "expanded": (lambda: torch.zeros(1, 4).expand(4, 4), "elements of it share memory"),
    "overlapping": (
        lambda: torch.zeros(9).as_strided((4, 4), (1, 1)),
        "elements of it share memory",
    ),
}


@pytest.mark.parametrize(("function", "library"), writing().items())
def test_what_must_not_be_written_to_is_refused_by_name(function: str, library: str) -> None:
    with override(mode="reference"):
        get_builder(library).load(verbose=False)
    overload = getattr(torch.ops.opkiln, function).default
    arguments = overload._schema.arguments
    written = [each for each in arguments if each.is_write]
    assert written
    for each, (make, why) in itertools.product(written, BAD.values()):
        given = {other.name: dummy(str(other.real_type), make() if other is each else ZEROS)
                 for other in arguments}  # fmt: skip
        with pytest.raises(RuntimeError, match=f"{function} writes to {each.name}.*{why}"):
            overload(**given)
