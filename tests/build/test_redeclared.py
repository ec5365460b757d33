"""An op that is declared anew in a running process, as a notebook's cell does it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._functorch.config
from sample import pool

import opkiln
from opkiln.builder import OpBuilder
from opkiln.errors import FallbackWarning, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package

_numbers = itertools.count(1)


def declare(name: str, *, factor: float = 2.0, slope: float = 2.0, extra: int = 0) -> OpBuilder:
    """Run the cell that defines the builder and its function, and make a builder."""
    words = {"NAME": "double", "DISTRIBUTION": name, "sources": lambda _: ["d.cpp"]}
    kind: type[OpBuilder] = type("Double", (OpBuilder,), words)

    @opkiln.library(kind).op()
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    @double.fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty([*x.shape, *[1] * extra])

    @double.backward
    def _(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad * slope

    return kind()


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A namespace of its own, whose op is served by its reference: no compiler is needed."""
    monkeypatch.setenv("OPKILN_MODE", "cached")
    return f"redeclared_{next(_numbers)}"


def slope(functions: Any, call: Callable[[Any], Any] | None = None) -> float:
    x = torch.ones(1, requires_grad=True)
    (call or functions.double)(x).sum().backward()
    assert x.grad is not None
    return x.grad.item()


def test_a_corrected_gradient_is_used_by_the_next_load(name: str) -> None:
    old = declare(name, slope=1.0).load()
    assert slope(old) == 1.0
    new = declare(name, slope=2.0).load()
    assert (slope(new), slope(old)) == (2.0, 2.0)
    assert slope(declare(name, slope=3.0).load(reload=True)) == 3.0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_corrected_gradient_is_used_by_graphs_that_were_compiled_before(
    backend: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    functions = declare(name, slope=1.0).load()
    double = functions.double
    graph = torch.compile(lambda x: double(x).view(1), fullgraph=True, backend=backend)
    # As it is at first; it is switched off with the first gradient that is replaced.
    with torch._functorch.config.patch(enable_autograd_cache=True):
        assert slope(functions, graph) == 1.0
        declare(name, slope=2.0).load()
        assert slope(functions, graph) == 2.0


def test_a_backward_pass_ends_with_the_gradient_it_began_with(name: str) -> None:
    x = torch.ones(1, requires_grad=True)
    out = declare(name, slope=1.0).load().double(x)
    declare(name, slope=2.0).load()
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 1.0


def test_a_new_reference_and_a_new_fake_are_used_by_the_next_load(name: str) -> None:
    def results() -> tuple[float, int]:
        double = getattr(torch.ops, name).double
        with torch._subclasses.FakeTensorMode() as mode:
            fake = double(mode.from_tensor(torch.ones(1)))
        return double(torch.ones(1)).item(), fake.dim()

    declare(name, factor=2.0).load()
    assert results() == (2.0, 1)
    declare(name, factor=3.0, extra=1).load()
    assert results() == (3.0, 2)


DECORATED = """
import opkiln
from torch import Tensor

@opkiln.op(source="", namespace=NAMESPACE)
def double(x: Tensor) -> Tensor:
    return x * 2
"""
CLASS = """
import opkiln
from torch import Tensor

class Double(opkiln.OpBuilder):
    NAME = "double"
    NAMESPACE = (NAMESPACE)
    sources = lambda self: ["d.cpp"]

@opkiln.library(Double).op()
def double(x: Tensor) -> Tensor:
    return x * 2

Double().load()
"""


@pytest.mark.parametrize("text", [DECORATED, CLASS], ids=["decorated", "class"])
def test_a_file_does_not_take_the_op_of_another_file_of_the_same_module_name(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_file(folder: str, namespace: str = name) -> None:
        path = tmp_path / folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("NAMESPACE)", f"{namespace!r})"))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        run_file("first")
        run_file("first")  # as importlib.reload does
        for folder, namespace in (("second", name), ("second", "other"), ("first", "other")):
            with pytest.raises(SpecError, match=f"op double of {name} is declared twice") as caught:
                run_file(folder, namespace)
            for each in ("first", folder):
                assert str(tmp_path / each / f"{name}.py") in caught.value.why
        run_file("first")


def test_a_gradient_is_replaced_under_a_native_kernel_without_a_build(
    package: Callable[..., Package], steps: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_STORE_LAYERS", str(pool.LAYER))  # only links are counted
    stable = package("stable")
    base: Any = importlib.import_module(f"{stable.name}.op").StableBuilder

    def cell(slope: float) -> Any:
        kind = type("StableBuilder", (base,), {"__module__": base.__module__})
        kit = opkiln.library(kind)
        its = importlib.import_module(f"{stable.name}.reference")
        kit.op(gradient=False)(its.who.reference)
        kit.op(mutates="x")(its.scale_.reference)
        axpy = kit.op()(its.axpy.reference)

        @axpy.backward
        def _(grad: Any, *_: Any) -> Any:
            return grad * slope, None, None

        return kind().load()

    for each in (1.0, 2.0):
        functions = cell(each)
        x = torch.ones(1, requires_grad=True)
        functions.axpy(x, torch.ones(1), 2.0).sum().backward()
        assert functions.who(torch.ones(1)) == 1
        assert x.grad is not None
        assert x.grad.item() == each
    assert steps.linked == 1
    pool.add(cache)
