"""Signatures of schemas, and how those of C++ functions differ from them."""

from __future__ import annotations

import pytest
import torch

from opkiln.base.model import CPU, CUDA, XPU, OpSpec
from opkiln.base.signature import (
    NativeFunction,
    argument_names,
    canonical_signature,
    cpp,
    differences,
    fits,
)

CANONICAL = {
    "f() -> ()": "() -> ()",
    "f(Tensor x) -> Tensor": "(Tensor) -> Tensor",
    "f(Tensor(a!) x, float by) -> ()": "(Tensor(!), float) -> ()",
    "f(Tensor(a!)[] xs, Tensor(b!)? y) -> ()": "(Tensor(!)[], Tensor(!)?) -> ()",
    "f(Tensor(a) x) -> Tensor(a)": "(Tensor) -> Tensor",
    "f(Tensor(a!) x) -> Tensor(a!)": "(Tensor(!)) -> Tensor",
    "f(Tensor(a! -> *) x, int n) -> (Tensor(a!) out, int)": "(Tensor(!), int) -> (Tensor, int)",
    "f(SymInt[] size, SymInt? n=None) -> (Tensor)": "(int[], int?) -> Tensor",
    "f(int[2] stride=1, bool[3] mask=[True, False, True]) -> int[]": "(int[], bool[]) -> int[]",
    "f(str mode='a, (b', *, ScalarType? dtype=None, Device device) -> (int, str)":
        "(str, ScalarType?, Device) -> (int, str)",
    "f.out(Tensor?[] xs,Tensor[]? ys, int[]? zs) -> Tensor?[]":
        "(Tensor?[], Tensor[]?, int[]?) -> Tensor?[]",
    "f(Scalar alpha=1, float eps=1e-05) -> (Tensor a, Tensor b)":
        "(Scalar, float) -> (Tensor, Tensor)",
}  # fmt: skip


@pytest.mark.parametrize("schema", CANONICAL)
def test_of_schema_gives_the_types_that_cpp_can_see(schema: str) -> None:
    assert canonical_signature(schema) == CANONICAL[schema]


@pytest.mark.parametrize("schema", CANONICAL)
def test_argument_names_are_those_that_torch_reads(schema: str) -> None:
    parsed = torch._C.parse_schema(schema)
    assert argument_names(schema) == tuple(each.name for each in parsed.arguments)


def _as_in_schemas(kind: str) -> str:
    """A type as Python code writes it, in the words of schemas: Optional[List[int]] is int[]?."""
    for word, mark in (("Optional", "?"), ("List", "[]")):
        if kind.startswith(f"{word}["):
            return _as_in_schemas(kind[len(word) + 1 : -1]) + mark
    return {"number": "Scalar", "SymInt": "int"}.get(kind, kind)


def test_of_schema_agrees_with_torch_about_its_own_schemas() -> None:
    seen = 0
    for schema in torch._C._jit_get_all_schemas():
        text, arguments = str(schema), schema.arguments
        odd = (
            "Dict",
            "Tuple",
            "t1",
            "...",
            "Future",
            "Await",
            "RRef",
            "AnyEnum",
            "complex",
            "-> t",
        )
        if not text.startswith("aten::") or any(word in text for word in odd):
            continue
        kinds = ", ".join(_as_in_schemas(str(each.real_type)) for each in arguments)
        ours = canonical_signature(text).replace("(!)", "").rpartition(" -> ")[0]
        assert ours == f"({kinds})", text
        assert argument_names(text) == tuple(each.name for each in arguments), text
        seen += 1
    assert seen > 1000


def test_differences_name_the_argument_and_both_types() -> None:
    schema = "f(Tensor x, int k, float scale) -> Tensor"
    assert differences(schema, "(Tensor, int, float) -> Tensor") == []
    assert differences(schema, "(Tensor, Tensor, int) -> int") == [
        "k is int in the schema, Tensor in C++",
        "scale is float in the schema, int in C++",
        "the result is Tensor in the schema, int in C++",
    ]
    assert differences(schema, "(Tensor) -> Tensor") == [
        "the schema has 3 arguments, the C++ function has 1 argument"
    ]
    assert differences("f(Tensor(a!) x) -> ()", "(Tensor) -> ()") == [
        "x is Tensor(!) in the schema, Tensor in C++"
    ]


@pytest.mark.parametrize(
    ("schema", "declaration"),
    [
        ("f(Tensor x, float s) -> Tensor", "Tensor f(const Tensor& x, double s)"),
        ("f(Tensor(a!) x, int n) -> ()", "void f(Tensor& x, int64_t n)"),
        (
            "f(Tensor[] xs, int[]? n, str s, ScalarType t) -> (Tensor, str)",
            (
                "opk::tuple<Tensor, opk::String> f(const opk::List<Tensor>& xs, "
                "const opk::optional<opk::List<int64_t>>& n, const opk::String& s, opk::DType t)"
            ),
        ),
        ("f(Tensor(a!)[] xs) -> int[]", "opk::List<int64_t> f(opk::List<Tensor>& xs)"),
        ("f(Scalar s) -> Tensor", ""),
    ],
)
def test_cpp_is_the_declaration_that_fits(schema: str, declaration: str) -> None:
    assert cpp(schema) == declaration


def _spec(backend: str = CPU, kernels: tuple[str, ...] = ("ns::f",)) -> OpSpec:
    schemas = ("f(Tensor x) -> Tensor", "g(Tensor x) -> int")
    return OpSpec(
        name="op", distribution="ns", root="/", sources=(), backend=backend, kernels=kernels,
        schemas=schemas,
    )  # fmt: skip


F = "(Tensor) -> Tensor"


def test_fits_needs_every_kernel_for_the_backends_device() -> None:
    assert fits(_spec(), [NativeFunction("f", "cpu", F)])
    assert not fits(_spec(), [NativeFunction("f", "cuda", F)])
    assert not fits(_spec(kernels=("ns::f", "ns::g")), [NativeFunction("f", "cpu", F)])
    assert fits(_spec(CUDA), [NativeFunction("f", "cuda", F), NativeFunction("f", "cpu", F)])
    assert fits(_spec(XPU), [NativeFunction("f", "cpu", F)])


def test_fits_refuses_what_is_not_declared_and_other_signatures() -> None:
    f = NativeFunction("f", "cpu", F)
    assert fits(_spec(), [f, NativeFunction("g", "cpu", "(Tensor) -> int")])
    assert not fits(_spec(), [f, NativeFunction("g", "cpu", "(Tensor) -> float")])
    assert not fits(_spec(), [f, NativeFunction("h", "cpu", F)])
    assert not fits(_spec(kernels=()), [f])
