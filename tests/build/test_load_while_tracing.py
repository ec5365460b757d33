"""The first use of an op inside a function that torch.compile or torch.export traces."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
from sample.package import Package

import opkiln
from opkiln.errors import FallbackWarning
from opkiln.loading import loader
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable

X, Y = torch.arange(4.0), torch.ones(4)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def stable(package: Callable[..., Package]) -> Package:
    return package("stable", "light")


def kind_of(package: Package) -> Any:
    return type(package.builder())


class Recorder:
    """A backend that keeps what it was given to compile."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def calls(self) -> list[str]:
        return [
            str(n.target) for g in self.graphs for n in g.graph.nodes if n.op == "call_function"
        ]


def is_native(package: Package) -> bool:
    return package.loaded().artifact is not None


@pytest.mark.parametrize("form", ["new builder", "jit_load", "builder from outside"])
def test_first_load_in_a_compiled_function_serves_natively_and_compiles_once(
    stable: Package, form: str
) -> None:
    kind = kind_of(stable)
    outside = kind()
    forms: dict[str, Callable[[], Any]] = {
        "new builder": lambda: kind().load(),
        "jit_load": lambda: kind().jit_load(),
        "builder from outside": outside.load,
    }
    ops = forms[form]
    recorder = Recorder()

    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops().axpy(a, b, 2.0) + 1  # type: ignore[no-any-return]

    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    for _ in range(3):
        assert torch.equal(compiled(X, Y), 2 * X + Y + 1)
    assert is_native(stable)
    assert len(recorder.graphs) == 1, "a later call compiled anew"
    assert f"{stable.name}.axpy.default" in recorder.calls()


def test_functions_that_were_called_before_are_compiled_as_well(stable: Package) -> None:
    kind = kind_of(stable)
    held = kind().load()
    assert torch.equal(held.axpy(X, Y, 2.0), 2 * X + Y)
    for get in (lambda: held, lambda: kind().load()):

        def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return get().axpy(a, b, 2.0)  # type: ignore[no-any-return]  # noqa: B023

        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X, Y), 2 * X + Y)


def test_first_load_kept_in_a_global_of_the_user_works_in_a_compiled_function(
    package: Callable[..., Package],
) -> None:
    stable = package("stable")  # its library registers itself
    kind, kept = kind_of(stable), {}

    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if "ops" not in kept:
            kept["ops"] = kind().load()
        return kept["ops"].axpy(a, b, 2.0)  # type: ignore[no-any-return]

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(X, Y), 2 * X + Y)
    assert is_native(stable)


def test_first_call_of_a_mutating_function_in_a_compiled_function_counts_its_version(
    stable: Package,
) -> None:
    kind = kind_of(stable)

    def model(a: torch.Tensor) -> None:
        kind().load().scale_(a, 3.0)

    x = torch.ones(4)
    torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert x.tolist() == [3.0] * 4
    assert x._version > 0


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_first_load_in_an_exported_module_is_in_its_graph(stable: Package, strict: bool) -> None:
    kind = kind_of(stable)

    class Model(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return kind().load().axpy(a, b, 2.0)  # type: ignore[no-any-return]

    exported = torch.export.export(Model(), (X, Y), strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == [f"{stable.name}.axpy.default"]
    assert torch.equal(exported.module()(X, Y), 2 * X + Y)
    assert is_native(stable)


def test_first_load_in_a_compiled_function_falls_back_with_a_warning(stable: Package) -> None:
    kind = kind_of(stable)

    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kind().load().axpy(a, b, 2.0)  # type: ignore[no-any-return]

    with override(mode="cached"), pytest.warns(FallbackWarning, match="op stable runs as its"):
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(X, Y)
    assert torch.equal(found, 2 * X + Y)
    assert importlib.import_module(f"{stable.name}.reference").calls


def test_first_load_that_fails_in_a_compiled_function_says_why(stable: Package) -> None:
    stable.edit("csrc/light.cpp", "#include <opkiln/op.h>", "#include <oops.h>")
    kind = kind_of(stable)

    def model(a: torch.Tensor) -> torch.Tensor:
        return kind().jit_load().axpy(a, a, 2.0)  # type: ignore[no-any-return]

    with pytest.raises(Exception, match=r"light.cpp does not compile") as caught:
        torch.compile(model, fullgraph=True, backend="aot_eager")(X)
    assert "oops" in str(caught.value)


def test_one_call_form_in_a_compiled_function_loads_while_it_is_traced() -> None:
    source = 'extern "C" int answer() { return 42; }'

    def model(x: torch.Tensor) -> torch.Tensor:
        opkiln.load_inline("answer", source, is_python_module=False, abi="none")
        return x + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), X + 1)
    assert loader.here.ops["jit", "answer", "cpu"].loaded.value.answer() == 42
