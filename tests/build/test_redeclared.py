"""An op that is declared anew in a running process, as a notebook's cell does it."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._functorch.config
from sample import pool

from opkiln.builder import OpBuilder
from opkiln.errors import FallbackWarning, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package

_numbers = itertools.count(1)
SCHEMA = "double(Tensor x) -> Tensor"


def parts(*, factor: float = 2.0, slope: float = 2.0, extra: int = 0) -> dict[str, Any]:
    """What a cell defines beside the builder: new objects each time."""
    return {
        "reference": SimpleNamespace(double=lambda x: x * factor),
        "fake": SimpleNamespace(double=lambda x: x.new_empty([*x.shape, *[1] * extra])),
        "backward": SimpleNamespace(double=lambda grad, x: grad * slope),
    }


def declare(name: str, schemas: tuple[str, ...] = (SCHEMA,), **given: Any) -> OpBuilder:
    """Run the cell that defines the builder, and make one."""
    methods = {kind: lambda _, value=value: value for kind, value in given.items()}
    declared = {"NAME": "double", "DISTRIBUTION": name, "SCHEMAS": schemas}
    kind = type("Double", (OpBuilder,), {**declared, **methods, "sources": lambda _: ["d.cpp"]})
    return kind()  # type: ignore[no-any-return]


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
    old = declare(name, **parts(slope=1.0)).load()
    assert slope(old) == 1.0
    new = declare(name, **parts(slope=2.0)).load()
    assert (slope(new), slope(old)) == (2.0, 2.0)
    assert slope(declare(name, **parts(slope=3.0)).load(reload=True)) == 3.0


def test_a_corrected_gradient_of_the_same_builder_is_used_by_a_reload(name: str) -> None:
    gradients = parts(slope=1.0)
    builder = declare(name, **gradients)
    assert slope(builder.load()) == 1.0
    gradients["backward"].double = lambda grad, x: grad * 2.0
    assert slope(builder.load()) == 1.0, "nothing changes without being asked"
    assert slope(builder.load(reload=True)) == 2.0


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_corrected_gradient_is_used_by_graphs_that_were_compiled_before(
    backend: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    functions = declare(name, **parts(slope=1.0)).load()
    double = functions.double
    graph = torch.compile(lambda x: double(x).view(1), fullgraph=True, backend=backend)
    # As it is at first; it is switched off with the first gradient that is replaced.
    with torch._functorch.config.patch(enable_autograd_cache=True):
        assert slope(functions, graph) == 1.0
        declare(name, **parts(slope=2.0)).load()
        assert slope(functions, graph) == 2.0


def test_a_backward_pass_ends_with_the_gradient_it_began_with(name: str) -> None:
    x = torch.ones(1, requires_grad=True)
    out = declare(name, **parts(slope=1.0)).load().double(x)
    declare(name, **parts(slope=2.0)).load()
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 1.0


def test_a_new_reference_and_a_new_fake_are_used_by_the_next_load(name: str) -> None:
    def results() -> tuple[float, int]:
        double = getattr(torch.ops, name).double
        with torch._subclasses.FakeTensorMode() as mode:
            fake = double(mode.from_tensor(torch.ones(1)))
        return double(torch.ones(1)).item(), fake.dim()

    declare(name, **parts(factor=2.0)).load()
    assert results() == (2.0, 1)
    declare(name, **parts(factor=3.0, extra=1)).load()
    assert results() == (3.0, 2)


def test_parts_that_are_declared_later_are_registered_then(name: str) -> None:
    given = parts(slope=7.0)
    declare(name, reference=given["reference"]).load()
    assert slope(declare(name, **given).load()) == 7.0
    # Taken away again, the reference is differentiated.
    assert slope(declare(name, reference=given["reference"]).load()) == 2.0


def test_a_gradient_with_keyword_only_arguments_is_replaced_too(name: str) -> None:
    schema = "double(Tensor x, *, Tensor by, float again=1.0) -> Tensor"

    def declared(slope: float) -> Any:
        given = parts()
        given["reference"].double = lambda x, by, again=1.0: x * by * again
        given["backward"].double = lambda grad, x, by, again: (grad * slope * again, grad * x, None)
        return declare(name, (schema,), **given).load()

    functions, by = declared(1.0), torch.ones(1, requires_grad=True)
    assert slope(functions, lambda x: functions.double(x, by=by, again=3.0)) == 3.0
    declared(2.0)
    assert slope(functions, lambda x: functions.double(x, by=by, again=3.0)) == 6.0
    assert by.grad is not None
    assert by.grad.item() == 2.0


def test_a_changed_schema_is_refused_by_a_plain_load_and_the_old_one_serves_on(name: str) -> None:
    functions = declare(name, **parts()).load()
    changed = declare(name, ("double(Tensor x, float by) -> Tensor",), **parts(slope=5.0))
    for _ in range(2):
        with pytest.raises(SpecError, match="the schema of double has changed") as caught:
            changed.load()
    assert repr(SCHEMA) in caught.value.why
    assert caught.value.hint == "restart the process"
    assert slope(functions) == 2.0


def test_a_function_that_is_added_is_served(name: str) -> None:
    declare(name, **parts()).load()
    given = parts()
    given["reference"].triple = lambda x: x * 3
    functions = declare(name, (SCHEMA, "triple(Tensor x) -> Tensor"), **given).load()
    assert functions.triple(torch.ones(1)).item() == 3.0
    assert slope(functions) == 2.0


def test_a_function_of_another_op_is_refused(name: str) -> None:
    declare(name, **parts()).load()
    other = declare(name, **parts(slope=7.0))
    other.name = "twofold"
    with pytest.raises(SpecError, match=f"{name}::double is a function of op double"):
        other.load()


DECORATED = """
import opkiln
from torch import Tensor

@opkiln.op(source="", namespace=NAMESPACE)
def double(x: Tensor) -> Tensor:
    return x * 2
"""
CLASS = """
from opkiln import OpBuilder

class Double(OpBuilder):
    NAME, SCHEMAS, NAMESPACE = "double", ("double(Tensor x) -> Tensor",), NAMESPACE
    sources = lambda self: ["d.cpp"]
    reference = lambda self: type("Reference", (), {"double": lambda x: x * 2})

Double().load()
"""


@pytest.mark.parametrize("text", [DECORATED, CLASS], ids=["decorated", "class"])
def test_a_file_does_not_take_the_op_of_another_file_of_the_same_module_name(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_file(folder: str, namespace: str = name) -> None:
        path = tmp_path / folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            text.replace("NAMESPACE)", f"{namespace!r})").replace(
                "), NAMESPACE\n", f"), {namespace!r}\n"
            )
        )
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
        def backward(grad: Any, *_: Any) -> Any:
            return grad * slope, None, None

        formulas = SimpleNamespace(axpy=backward)
        methods = {"backward": lambda _: formulas, "__module__": base.__module__}
        return type("StableBuilder", (base,), methods)().load()

    for each in (1.0, 2.0):
        functions = cell(each)
        x = torch.ones(1, requires_grad=True)
        functions.axpy(x, torch.ones(1), 2.0).sum().backward()
        assert functions.who(torch.ones(1)) == 1
        assert x.grad is not None
        assert x.grad.item() == each
    assert steps.linked == 1
    pool.add(cache)
