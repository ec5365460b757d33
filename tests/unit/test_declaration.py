"""What an author declares in Python, held against the op's schemas. Nothing is built."""

from __future__ import annotations

import math
import re
import textwrap
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from sample import child
from torch import Tensor

from opkiln.builder.registry import ALL_OPS, bundled_ops, libraries
from opkiln.errors import SpecError
from opkiln.loading import declaration
from opkiln.loading.register import Registration


def check(schemas: str | tuple[str, ...], **declared: Any) -> None:
    """Hold objects against schemas; each is what ``reference()``, say, returns."""
    listed = (schemas,) if isinstance(schemas, str) else schemas
    provide = {kind: (lambda value=value: value) for kind, value in declared.items()}
    registration = Registration("spaces", listed, **{"reference": None, **provide})
    declaration.check_registration("sums", "my_ops", registration)


def reference(**functions: Any) -> Any:
    return SimpleNamespace(**functions)


@pytest.mark.parametrize("name", bundled_ops())
def test_check_passes_every_op_of_the_catalogue(name: str) -> None:
    for _, builder in libraries(name, ALL_OPS[name]):
        declaration.check(builder().op())


def test_functions_of_a_part_that_fails_are_the_class_of_its_exception() -> None:
    registration = Registration("s", ("f() -> ()",), fails(ImportError("no")), lambda: math)
    assert declaration.functions(registration) == {"reference": [("reference()", ImportError)]}


def test_the_first_to_import_torch_may_be_any_of_many_threads() -> None:
    # They ask for it by different names, as torch and as torch.nn.functional.
    code = """
        import sys, threading
        from opkiln.loading import declaration
        from opkiln.builder.registry import ALL_OPS, bundled_ops, libraries

        ops = [each().op() for name in bundled_ops() for _, each in libraries(name, ALL_OPS[name])]
        assert len(ops) > 50 and "torch" not in sys.modules
        passed = []
        def check(op):
            declaration.check(op)
            passed.append(op)
        threads = [threading.Thread(target=check, args=(op,)) for op in ops]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert "torch.nn" in sys.modules
        print(len(ops) - len(passed))
    """
    assert child.run(textwrap.dedent(code), bare=False, forked=False).strip() == "0"


class Spelled:
    """A reference, fakes and gradients with a slip in each."""

    @staticmethod
    def scaled_ad(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def scaled_add_backwards(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Right:
    @staticmethod
    def scaled_add(x: Tensor) -> Tensor:
        return x


def test_check_names_a_misspelled_function_of_the_reference_and_where_it_was_looked_for() -> None:
    with pytest.raises(SpecError) as caught:
        check("scaled_add(Tensor x) -> Tensor", reference=Spelled)
    error = caught.value
    assert error.what == (
        "op sums: the reference has no function 'scaled_add'; did you mean 'scaled_ad'?"
    )
    assert f"looked for in {__name__}.Spelled" in error.why
    assert error.hint == f"rename scaled_ad to scaled_add in {__name__}.Spelled"


def test_check_names_a_function_that_the_reference_lacks() -> None:
    schemas = ("scaled_add(Tensor x) -> Tensor", "other(Tensor x) -> Tensor")
    with pytest.raises(SpecError, match="the reference has no function 'other'") as caught:
        check(schemas, reference=Right)
    assert "it has: scaled_add" in caught.value.why


def test_check_names_a_misspelled_fake() -> None:
    with pytest.raises(SpecError, match="the fake has no function 'scaled_add'; did you mean"):
        check("scaled_add(Tensor x) -> Tensor", reference=Right, fake=Spelled)


def test_check_lets_the_reference_give_the_shapes_that_the_fakes_lack() -> None:
    schemas = ("scaled_add(Tensor x) -> Tensor", "keep(Tensor x) -> Tensor")
    both = reference(scaled_add=Right.scaled_add, keep=lambda x: x)
    check(schemas, reference=both, fake=Right)
    with pytest.raises(SpecError, match="the fake has no function 'keep'"):
        check(schemas, fake=Right)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scaled_ad", "the backward has no function 'scaled_add'; did you mean 'scaled_ad'"),
        ("other", "the backward has no function 'scaled_add'"),
    ],
)
def test_check_names_a_gradient_that_would_never_be_used(name: str, message: str) -> None:
    gradients = SimpleNamespace(**{name: lambda grad, x: grad})
    with pytest.raises(SpecError, match=message):
        check("scaled_add(Tensor x) -> Tensor", reference=Right, backward=gradients)


def same(x: Tensor, count: int, scale: float = 1.0) -> Tensor:
    return x


def lists(xs: list[Tensor], sizes: tuple[int, ...], *, flag: bool = False) -> None:
    pass


def anything(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError


def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


def untyped(x, count, scale=1.0):  # type: ignore[no-untyped-def]
    return x


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def pair(x: Tensor, dtype: torch.dtype) -> Pair:
    return Pair(x, x)


@pytest.mark.parametrize(
    ("schema", "function"),
    [
        ("f(Tensor x, int count, float scale=1.0) -> Tensor", same),
        ("f(Tensor x, SymInt count, float scale=1.0) -> Tensor", same),
        ("f(Tensor(a!) x, int count, float scale=1.0) -> Tensor(a!)", same),
        ("f(Tensor[] xs, int[] sizes, *, bool flag=False) -> ()", lists),
        ("f(Tensor x, int y, *, bool z) -> (Tensor, Tensor)", anything),
        ("f(Tensor x) -> (Tensor, Tensor, Tensor)", three),
        ("f(Tensor x, int count, float scale=1.0) -> Tensor", untyped),
        ("f(Tensor x, ScalarType dtype) -> (Tensor, Tensor)", pair),
        ("f(Tensor x) -> Tensor", torch.relu),
    ],
)
def test_check_takes_a_signature_that_can_be_called_as_the_schema_says(
    schema: str, function: Any
) -> None:
    check(schema, reference=reference(f=function))


@pytest.mark.parametrize(
    ("schema", "function", "message"),
    [
        ("f(int x, int count, float scale=1.0) -> Tensor", same, "x is int in the schema, Tensor"),
        ("f(Tensor x, Tensor count, float scale=1.0) -> Tensor", same, "count is Tensor in the"),
        ("f(Tensor[] x, int count, float scale=1.0) -> Tensor", same, r"x is Tensor\[\] in"),
        ("f(Tensor xs, int[] sizes, *, bool flag=False) -> ()", lists, "xs is Tensor in the"),
        ("f(Tensor? x, bool count, float scale=1.0) -> Tensor", same, "count is bool in the"),
        (
            "f(Tensor x, float scale=1.0) -> Tensor",
            same,
            "argument 2 is scale in the schema, count",
        ),
        ("f(int count, Tensor x, float scale=1.0) -> Tensor", same, "argument 1 is count in"),
        ("f(Tensor x) -> Tensor", same, "missing a required argument: 'count'"),
        (
            "f(Tensor x, int count, float scale=1.0, int y=1) -> Tensor",
            same,
            "too many positional arguments",
        ),
        ("f(Tensor x, int count, float scale=2.0) -> Tensor", same, "2.0 by default in the schema"),
        ("f(Tensor x, int count=3, float scale=1.0) -> Tensor", same, "has no default in the ref"),
        (
            "f(Tensor x, int count, *, float by=1.0) -> Tensor",
            same,
            "unexpected keyword argument 'by'",
        ),
        (
            "f(Tensor[] xs, int[] sizes, bool flag=False) -> ()",
            lists,
            "too many positional arguments",
        ),
        (
            "f(Tensor x, int count, float scale=1.0) -> ()",
            same,
            r"the result is \(\) in the schema",
        ),
        (
            "f(Tensor x, int count, float scale=1.0) -> int",
            same,
            "the result is int in the schema, Ten",
        ),
        (
            "f(Tensor x, int count, float scale=1.0) -> (Tensor, Tensor)",
            same,
            r"the result is \(Tensor, Tensor\) in",
        ),
        ("f(Tensor x) -> (Tensor, Tensor)", three, r"in the schema, \(Tensor, Tensor, Tensor\) in"),
        ("f(Tensor x) -> Tensor", three, r"the result is Tensor in the schema, \(Ten"),
        ("f(Tensor x, int count, float scale=2.0) -> Tensor", untyped, "scale is 2.0 by default"),
    ],
)
def test_check_refuses_a_signature_that_contradicts_the_schema(
    schema: str, function: Any, message: str
) -> None:
    with pytest.raises(SpecError, match="the schema and the reference of f contradict") as caught:
        check(schema, reference=reference(f=function))
    assert f"schema: {schema}" in caught.value.why
    assert re.search(message, caught.value.why), caught.value.why


def fails(error: Exception) -> Any:
    def provide() -> Any:
        raise error

    return provide


def test_check_leaves_out_what_needs_a_package_that_is_not_installed() -> None:
    provide = fails(ModuleNotFoundError("No module named 'einops'", name="einops"))
    declaration.check_registration("sums", "my_ops", Registration("s", ("f() -> ()",), provide))


@pytest.mark.parametrize(
    "error",
    [ModuleNotFoundError("No module named 'my_ops.refrence'", name="my_ops.refrence"), NameError()],
)
def test_check_refuses_a_reference_that_fails_by_itself(error: Exception) -> None:
    registration = Registration("s", ("f() -> ()",), fails(error))
    with pytest.raises(SpecError, match=r"op sums: its reference\(\) fails") as caught:
        declaration.check_registration("sums", "my_ops", registration)
    assert caught.value.__cause__ is error
