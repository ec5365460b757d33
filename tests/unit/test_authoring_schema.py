"""The schema that ``@opkiln.op`` makes of a function's annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from opkiln.authoring import schema
from opkiln.errors import SpecError


def plain(x: Tensor, n: int, scale: float, flag: bool, name: str) -> Tensor:
    return x


def optional(x: Tensor | None, n: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.ones(1)


def lists(
    xs: list[Tensor],
    sizes: Sequence[int],
    weights: list[float] | None,
    dims: tuple[int, ...] = (0, 1),
) -> tuple[Tensor, list[Tensor]]:
    return xs[0], xs


def defaults(x: Tensor, a: int = 3, b: float = 1e-5, c: bool = True, d: str = "mean") -> Tensor:
    return x


def in_place(x: Tensor, y: Tensor, device: torch.device) -> None:
    return None


_LISTS = (
    "lists({}[] xs, SymInt[] sizes, float[]? weights, SymInt[] dims=[0, 1]) -> (Tensor, Tensor[])"
)


@pytest.mark.parametrize(
    ("function", "mutates", "expected"),
    [
        (plain, (), "plain(Tensor x, SymInt n, float scale, bool flag, str name) -> Tensor"),
        (
            optional, (),
            "optional(Tensor? x, SymInt? n=None, *, ScalarType? dtype=None) -> Tensor",
        ),
        (
            lists, (),
            _LISTS.format("Tensor"),
        ),
        (
            defaults, (),
            'defaults(Tensor x, SymInt a=3, float b=1e-05, bool c=True, str d="mean") -> Tensor',
        ),
        (in_place, ("x",), "in_place(Tensor(a!) x, Tensor y, Device device) -> ()"),
        (in_place, ("x", "y"), "in_place(Tensor(a!) x, Tensor(b!) y, Device device) -> ()"),
        (lists, "xs",
            _LISTS.format("Tensor(a!)")),
    ],
)  # fmt: skip
def test_schema_follows_from_the_annotations_and_torch_reads_it(
    function: Any, mutates: Any, expected: str
) -> None:
    made = schema.of_function(function.__name__, function, mutates)
    assert made == expected
    torch._C.parse_schema(made)


def untyped(x, n: int) -> Tensor:  # type: ignore[no-untyped-def]
    return torch.ones(n)


def starred(*xs: Tensor) -> Tensor:
    return xs[0]


def silent(x: Tensor):  # type: ignore[no-untyped-def]
    return x


def strange(x: Tensor, table: dict[str, int]) -> Tensor:
    return x


def infinite(x: Tensor, most: float = float("inf")) -> Tensor:
    return x


def unknown(x: Nowhere) -> Tensor:  # type: ignore[name-defined]  # noqa: F821
    return x


def strange_result(x: Tensor) -> Tensor | None:
    return x


@pytest.mark.parametrize(
    ("function", "mutates", "words"),
    [
        (untyped, (), "argument x has no annotation"),
        (starred, (), "it takes *xs"),
        (silent, (), "says nothing of its result"),
        (strange, (), "argument table is annotated with dict[str, int]"),
        (infinite, (), "most=inf cannot be the default"),
        (unknown, (), "its annotations cannot be evaluated"),
        (strange_result, (), "the result is annotated with"),
        (plain, ("z",), "mutates= names z"),
        (plain, ("n",), "mutates= names n"),
    ],
)
def test_function_that_cannot_be_an_op_is_refused_with_the_reason(
    function: Any, mutates: Any, words: str
) -> None:
    with pytest.raises(SpecError) as refused:
        schema.of_function(function.__name__, function, mutates)
    assert words in str(refused.value)
