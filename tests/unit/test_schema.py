"""The schema that ``@opkiln.op`` makes of a function's annotations."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import opkiln
from opkiln.errors import SpecError
from opkiln.loading import schema


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
        (lists, ("xs",),
            _LISTS.format("Tensor(a!)")),
    ],
)  # fmt: skip
def test_schema_follows_from_the_annotations_and_torch_reads_it(
    function: Any, mutates: Any, expected: str
) -> None:
    made = schema.schema_of(function.__name__, function, mutates)
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
        (infinite, (), "most=inf cannot be the default of an argument annotated with float"),
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
        schema.schema_of(function.__name__, function, mutates)
    assert words in str(refused.value)


_KINDS: dict[Any, Any] = {
    int: int, float: (int, float), bool: bool, str: str, torch.device: torch.device,
}  # fmt: skip
_LEAVES = [*_KINDS, Tensor, torch.dtype]
_ANNOTATIONS = [
    *_LEAVES, *(each | None for each in _LEAVES),
    *(list[each] for each in _LEAVES), *(list[each] | None for each in _LEAVES),  # type: ignore[valid-type]
]  # fmt: skip
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(min_value=(1 << 63) - 2), st.floats(),
    st.integers(max_value=2 - (1 << 63)), st.text(max_size=5), st.binary(max_size=2),
    st.sampled_from([torch.device("cpu"), torch.float32, torch.ones(1), object(), 10**5000, 1j]),
)  # fmt: skip


def _has_type(value: Any, annotation: Any) -> bool:
    if hasattr(annotation, "__args__") and type(None) in annotation.__args__:
        return value is None or _has_type(value, annotation.__args__[0])
    if getattr(annotation, "__origin__", None) is list:
        parts = isinstance(value, (list, tuple))
        return parts and all(_has_type(each, annotation.__args__[0]) for each in value)
    good = annotation in _KINDS and isinstance(value, _KINDS[annotation])
    return good and (annotation is bool or not isinstance(value, bool))


def _same(parsed: Any, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(parsed) == len(value) and all(map(_same, parsed, value))
    if isinstance(value, float):
        return bool(parsed == value) and math.copysign(1, parsed) == math.copysign(1, value)
    return str(parsed) == str(value) if isinstance(value, torch.device) else bool(parsed == value)


@given(
    annotation=st.sampled_from(_ANNOTATIONS),
    value=_VALUES | st.lists(_VALUES, max_size=3) | st.tuples(_VALUES),
)
@example(annotation=int, value=1 << 63)
@example(annotation=int, value="a")
@example(annotation=int, value=True)
@example(annotation=float, value=None)
@example(annotation=float, value=1e-320)
@example(annotation=float, value=10**400)
@example(annotation=float | None, value=1)
@example(annotation=float, value=-0.0)
@example(annotation=list[int], value=[1, -(1 << 63) - 1])
@example(annotation=list[float], value=[0.5, 2])
@example(annotation=Tensor, value=None)
@example(annotation=torch.dtype, value=5)
@example(annotation=torch.device, value=torch.device("cpu"))
def test_a_default_is_what_torch_reads_or_the_declaration_is_refused(
    annotation: Any, value: Any
) -> None:
    def declared(x: Tensor, y: Any) -> Tensor:
        return x

    declared.__annotations__["y"] = annotation
    declared.__defaults__ = (value,)
    refused = None
    try:
        made = schema.schema_of("declared", declared)
    except SpecError as error:
        refused = error
    if refused is None:
        assert _has_type(value, annotation)
        assert _same(torch._C.parse_schema(made).arguments[1].default_value, value)
    else:
        name = inspect.formatannotation(annotation)
        assert f"cannot be the default of an argument annotated with {name}" in refused.what
        assert refused.hint.startswith("y: ")


@pytest.mark.parametrize("value", [3, -(1 << 63), 0.25, True, "mean", torch.device("cpu"), [1, 2]])
def test_ordinary_defaults_are_taken(value: Any) -> None:
    def declared(x: Tensor, y: Any) -> Tensor:
        return x

    declared.__annotations__["y"] = list[int] if isinstance(value, list) else type(value)
    declared.__defaults__ = (value,)
    schema.schema_of("declared", declared)


async def awaited(x: Tensor) -> Tensor:
    return x


def generated(x: Tensor) -> Iterator[Tensor]:
    yield x


async def both(x: Tensor) -> AsyncIterator[Tensor]:
    yield x


@pytest.mark.parametrize("function", [awaited, generated, both])
def test_a_function_that_returns_before_it_computes_is_refused(function: Any) -> None:
    words = f"{function.__name__} is {'a generator' if function is generated else 'an async'}"
    with pytest.raises(SpecError, match=words):
        opkiln.op(source="")(function)

    def late_parts(x: Tensor) -> Tensor:
        return x

    made = opkiln.op(source="")(late_parts)
    for part in (made.backward, made.fake, made.vmap):
        with pytest.raises(SpecError, match=words):
            part(function)


_NOT_TEXTS = st.sampled_from([3, None, True, b"x", [3], [None], [""], "", ["a", b"b"], object()])


@given(where=st.sampled_from(["sources", "cuda", "mutates", "libraries"]),
       wrong=_NOT_TEXTS)  # fmt: skip
def test_what_is_not_text_is_refused_where_a_declaration_has_texts(where: str, wrong: Any) -> None:
    def declared(x: Tensor) -> Tensor:
        return x

    declare = {
        "sources": lambda: opkiln.op(wrong),
        "cuda": lambda: opkiln.op(cuda=wrong),
        "mutates": lambda: opkiln.op("a.cpp", mutates=wrong)(declared),
        "libraries": lambda: opkiln.op("a.cpp", needs={"libraries": wrong})(declared),
    }
    with pytest.raises(SpecError):
        declare[where]()


@pytest.mark.parametrize(
    "arguments",
    [
        {"source": 3}, {"source": {}}, {"source": {"cpu": 3}}, {"source": {3: "x"}},
        {"source": "", "needs": 3}, {"source": "", "needs": {3: 3}},
        {"source": "", "needs": {"archs": "x"}}, {"source": "", "namespace": 3},
        {"source": "", "variants": 3}, {"source": "", "tune": 3}, {"source": "", "ahead": 3},
    ],
    ids=repr,
)  # fmt: skip
def test_an_argument_of_the_decorator_that_cannot_be_is_refused(arguments: Any) -> None:
    def declared(x: Tensor) -> Tensor:
        return x

    with pytest.raises(SpecError):
        opkiln.op(**arguments)(declared)


@pytest.mark.parametrize(
    "arguments",
    [{"name": 3}, {"dtypes": 3}, {"dtypes": [[3]]}, {"without": 3}, {"without": {"cpu": 3}},
     {"parts": 3}, {"parts": [3]}],
    ids=repr,
)  # fmt: skip
def test_an_argument_of_a_library_that_cannot_be_is_refused(arguments: Any) -> None:
    with pytest.raises(SpecError):
        opkiln.library(**{"name": "declared", "source": "", **arguments})
