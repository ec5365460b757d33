"""Ops with compile-time parameters: which variant is built, called and shipped."""

from __future__ import annotations

import json
import warnings
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import child, forks
from sample.levels import LOW
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import opkiln
from opkiln.errors import DifferenceError, FallbackWarning, LoadError, SpecError, UsageError
from opkiln.loading import loader
from opkiln.ship import selection
from opkiln.ship.precompile import precompile
from opkiln.testing import op_tests

if TYPE_CHECKING:
    from pathlib import Path

# A variant that is called with arguments of another gives a wrong result.
SOURCE = """
#include <opkiln/op.h>
using opk::Tensor;
Tensor {name}(const Tensor& x) {{
  OPK_SERVED(x.is_contiguous(), "x is not contiguous");
  OPK_SERVED(x.dtype() == opk::dtype_of<T>, "x is ", x.dtype());
  Tensor out = opk::empty_like(x);
  const T* a = x.data<const T>();
  T* o = out.data<T>();
  for (int64_t i = 0; i < x.numel(); ++i) o[i] = SIZE * a[i];
  return out;
}}
OPKILN_OP({name}, cpu);
"""
LISTED = {"SIZE": (4, 8), "T": ("float", "double")}


def by_size(x: Tensor) -> dict[str, Any] | None:
    if x.dim() == 0:
        return None
    return {"T": "float" if x.dtype == torch.float32 else "double", "SIZE": x.shape[-1]}


def sized_op(name: str, source: str = SOURCE, **more: Any) -> Any:
    def function(x: Tensor) -> Tensor:
        return x * x.shape[-1] if x.dim() else x.clone()

    function.__name__ = function.__qualname__ = name
    text = source.format(name=name)
    op = opkiln.op(source=text, namespace="varied", variants=LISTED, **more)(function)
    op.variant(by_size)
    return op


sized = sized_op("sized")  # its libraries are built once for all tests


def built(name: str) -> set[str]:
    return {op for _, op, _ in loader.loaded_here() if op.startswith(f"{name}__")}


def test_only_the_variant_that_is_called_is_built_and_others_later() -> None:
    op = sized_op("one_by_one")
    four, eight = torch.randn(3, 4), torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(op(four), four * 4)
        assert built("one_by_one") == {"one_by_one__SIZE_4_T_float"}
        assert torch.equal(torch.ops.varied.one_by_one(eight), eight * 8)
        assert torch.equal(op(four), four * 4)
        assert torch.equal(op(x=eight), eight * 8)
    assert built("one_by_one") == {"one_by_one__SIZE_4_T_float", "one_by_one__SIZE_8_T_float"}
    assert op.load("cpu", SIZE=4, T="float")
    with pytest.raises(SpecError, match="has no variant with SIZE=5"):
        op.load("cpu", SIZE=5)


def test_values_that_are_not_listed_run_the_reference_and_the_user_is_told() -> None:
    five, no_size = torch.randn(5), torch.tensor(3.0)
    with pytest.warns(
        FallbackWarning, match=r"no variant has SIZE=5; variants= lists 4, 8"
    ) as told:
        assert torch.equal(sized(five), five * 5)
    assert told[0].filename == __file__
    with pytest.warns(FallbackWarning, match=r"the function of @sized.variant chose none"):
        assert torch.equal(sized(no_size), no_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sized(five), sized(no_size)  # told once
    text = str(sized.explain(SIZE=4, T="float"))
    assert "sized: the reference ran: no variant has SIZE=5" in text
    assert "sized (SIZE_4_T_float): " in text
    with pytest.raises(LoadError, match="has no variant for these arguments"):
        sized.check(five)


def test_native_mode_makes_an_error_of_values_that_are_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "native")
    with pytest.raises(LoadError, match="no variant has SIZE=6"):
        sized(torch.randn(6))


@pytest.mark.parametrize("dynamic", [True, None])
def test_compiled_function_chooses_the_variant_when_it_runs(dynamic: bool | None) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    step = torch.compile(lambda x: sized(x) + 1, fullgraph=True, dynamic=dynamic, backend=backend)
    for size in (4, 8, 4):
        x = torch.randn(3, size)
        assert torch.equal(step(x), x * size + 1)
    assert graphs
    assert all("SIZE_" not in graph for graph in graphs)
    x = torch.randn(3, 8, requires_grad=True)
    torch.compile(sized, fullgraph=True, dynamic=dynamic, backend="aot_eager")(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 8), 8.0))


def test_traced_and_exported_graphs_hold_no_variant() -> None:
    sized(torch.randn(4))
    traced = make_fx(sized)(torch.randn(3, 4))
    assert "SIZE_4" not in str(traced.graph)
    eight = torch.randn(3, 8)
    assert torch.equal(traced(eight), eight * 8)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sized(x)

    shapes = {"x": {1: torch.export.Dim("size", min=2, max=64)}}
    program = torch.export.export(Module(), (torch.randn(3, 4),), dynamic_shapes=shapes)
    assert "SIZE_4" not in str(program.graph)
    assert torch.equal(program.module()(eight), eight * 8)


class Doubled(Tensor):
    """A tensor whose memory has twice the size that it tells, as the parts of a sharded one may
    have another."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        shape = (*inner.shape[:-1], inner.shape[-1] // 2)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*(each.inner if isinstance(each, cls) else each for each in args))


def test_subclass_of_tensor_gets_the_variant_of_what_it_holds() -> None:
    sized(torch.randn(4))
    inner = torch.randn(3, 8)
    assert torch.equal(sized(Doubled(inner)), inner * 8)


def test_gradients_transforms_and_meta_tensors() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        (grad,) = torch.autograd.grad(sized(x).sum(), x)
        assert torch.equal(grad, torch.full((3, 4), 4.0))
    with torch.no_grad():
        assert not sized(x).requires_grad
    many = torch.randn(5, 3, 4)
    assert torch.equal(torch.vmap(sized)(many), many * 4)
    assert torch.equal(torch.func.grad(lambda v: sized(v).sum())(many), torch.full_like(many, 4.0))
    _, tangent = torch.func.jvp(sized, (many,), (torch.ones_like(many),))
    assert torch.equal(tangent, torch.full_like(many, 4.0))
    assert sized(torch.empty(2, 4, device="meta")).shape == (2, 4)
    torch.library.opcheck(sized.overload, (torch.randn(3, 4),))


def test_op_that_writes_has_variants_too() -> None:
    text = """
    #include <opkiln/op.h>
    void grow(opk::Tensor& x) {
      float* p = x.data<float>();
      for (int64_t i = 0; i < x.numel(); ++i) p[i] += SIZE;
    }
    OPKILN_OP(grow, cpu);
    """

    @opkiln.op(source=text, mutates="x", namespace="varied", variants={"SIZE": (4,)})
    def grow(x: Tensor) -> None:
        x.add_(x.shape[-1])

    @grow.variant
    def _(x: Tensor) -> dict[str, int]:
        return {"SIZE": x.shape[-1]}

    x = torch.zeros(4)
    for count in (1, 2):
        version = x._version
        grow(x)
        assert torch.equal(x, torch.full((4,), 4.0 * count))
        assert x._version == version + 1
    torch.compile(grow, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(x, torch.full((4,), 12.0))
    with pytest.raises(RuntimeError, match="grow writes to x, so it has no gradient"):
        grow(torch.zeros(4, requires_grad=True))


def test_opkiln_check_compares_the_variant_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_MODE", "check")
    op = sized_op("compared", SOURCE.replace("SIZE * a[i]", "(SIZE == 8 ? 7 : SIZE) * a[i]"))
    four, eight = torch.ones(4), torch.ones(8)
    for _ in range(2):
        assert torch.equal(op(four), four * 4)
    for call in (op, op, torch.ops.varied.compared, op.check):
        with pytest.raises(DifferenceError, match="native and reference differ"):
            call(eight)


def test_decorating_again_replaces_the_variants() -> None:
    old = sized_op("redone")
    x = torch.randn(4)
    assert torch.equal(old(x), x * 4)
    assert torch.equal(old(torch.ones(8)), torch.full((8,), 8.0))

    def function(x: Tensor) -> Tensor:
        return x * -x.shape[-1]

    function.__name__, function.__qualname__ = "redone", "redone"
    text = SOURCE.format(name="redone").replace("SIZE *", "-SIZE *")
    new = opkiln.op(source=text, namespace="varied", variants=LISTED)(function)
    with pytest.raises(SpecError, match="op redone has variants, and nothing chooses one"):
        new(x)
    new.variant(by_size)
    held = torch.ops.varied.redone.SIZE_8_T_float  # of a variant that is not loaded any more
    for call in (new, old, torch.ops.varied.redone, held):
        assert torch.equal(call(x), x * -4)
    assert torch.equal(new(torch.ones(8)), torch.full((8,), -8.0))
    with pytest.raises(LoadError, match="this function is the old one"):
        old.load("cpu", SIZE=8)

    def no_variants(x: Tensor) -> Tensor:
        return x + 1

    no_variants.__name__, no_variants.__qualname__ = "redone", "redone"
    opkiln.op(source="", namespace="varied")(no_variants)
    with pytest.warns(FallbackWarning):
        assert torch.equal(torch.ops.varied.redone(x), x + 1)
    assert torch.equal(old(x), x + 1)


def test_emulated_op_has_variants() -> None:
    text = """
    #include <opkiln/op.h>
    __global__ void scale(const T* x, T* out, int64_t count) {
      const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
      if (i < count) out[i] = SIZE * x[i];
    }
    opk::Tensor emulated_size(const opk::Tensor& x) {
      opk::Tensor out = opk::empty_like(x);
      const T* a = x.data<const T>();
      opk::launch(scale, (x.numel() + 31) / 32, 32, 0, a, out.data<T>(), x.numel());
      return out;
    }
    OPKILN_OP(emulated_size, cuda);
    """

    @opkiln.op(source={"cuda": text}, emulate=True, namespace="varied", variants=LISTED)
    def emulated_size(x: Tensor) -> Tensor:
        return x * x.shape[-1]

    emulated_size.variant(by_size)
    x = torch.randn(3, 4)
    assert torch.equal(emulated_size.check(x), x * 4)


def test_op_without_variants_takes_no_values() -> None:
    @opkiln.op(source="", namespace="varied")
    def unvaried(x: Tensor) -> Tensor:
        return x

    with pytest.raises(SpecError, match="has no variants to choose from"):
        unvaried.variant(by_size)
    with pytest.raises(SpecError, match="op unvaried has no variant with SIZE=4"):
        unvaried.load("cpu", SIZE=4)


# Packages

PACKAGE = {
    "__init__.py": """import opkiln
from torch import Tensor

@opkiln.op("scale.cpp", variants={"SIZE": (4, 8)})
def scale(x: Tensor) -> Tensor:
    return x * x.shape[-1]

@scale.variant
def _(x):
    return {"SIZE": x.shape[-1]}
""",
    "scale.cpp": SOURCE.format(name="scale").replace("T*", "float*").replace("<T>", "<float>")
    .replace("<const T>", "<const float>"),
}  # fmt: skip
USE = """
import torch, scale_package
x = torch.ones(3, 8)
assert torch.equal(scale_package.scale(x), x * 8)
print(scale_package.scale.load("cpu"))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    home = tmp_path / "site" / "scale_package"
    home.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (home / name).write_text(text)
    info = tmp_path / "site" / "scale_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scale-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opkiln.ops]\nscale_package = scale_package\n")
    return tmp_path / "site"


def test_commands_know_every_listed_variant(package: Path) -> None:
    def run(*argv: str, code: int = 0, **more: str) -> str:
        env = {**child.environment(), "PYTHONPATH": str(package), **more}
        done = child.finish(forks.Fork(argv, stdout=PIPE, stderr=PIPE, text=True, env=env))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    opkiln_ = ("-m", "opkiln")
    assert "scale__SIZE_8" not in run(*opkiln_, "build", "scale__SIZE_4")
    told = run(*opkiln_, "check", "scale", code=1)
    assert [line.split()[:2] for line in told.splitlines()[:2]] == [
        ["scale__SIZE_4", "cached"], ["scale__SIZE_8", "would"],
    ]  # fmt: skip
    lines = run(*opkiln_, "build", "scale").splitlines()
    assert [line.split()[0] for line in lines if "SIZE" in line and "/" in line] == [
        "scale__SIZE_4", "scale__SIZE_8",
    ]  # fmt: skip
    explained = json.loads(run(*opkiln_, "explain", "scale", "--json"))
    assert [each["verdict"] for each in explained["variants"]] == ["cached", "cached"]
    report = json.loads(run(*opkiln_, "report", "--hide-env", "--json"))
    found = [each for each in report["ops"] if each["op"].startswith("scale")]
    assert [(each["op"], each["error"]) for each in found] == [
        ("scale__SIZE_4", ""), ("scale__SIZE_8", ""),
    ]  # fmt: skip
    assert run("-c", USE, OPKILN_MODE="sealed").strip() == "True"
    told = run(*opkiln_, "plan", "scale", code=2)
    assert "they are scale__SIZE_4, scale__SIZE_8" in told


def test_builder_of_an_op_with_variants_names_them() -> None:
    with pytest.raises(UsageError, match="op sized has a library for each of its variants"):
        sized.builder().load()
    names = [each.NAME for each in sized.builder.variants()]
    assert names[0] == "sized__SIZE_4_T_float"
    assert len(names) == 4


def test_builder_of_one_variant_loads_it() -> None:
    four = sized.builder.variants()[0]
    functions = four().jit_load()
    x = torch.randn(4)
    assert torch.equal(functions.sized(x), x * 4)


def test_wheel_has_every_listed_variant_and_they_serve(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_BUILD_SCALE", "1")
    monkeypatch.setenv("OPKILN_BUILD_TARGETS", f"cpu:{LOW}")
    ops = selection.declared_ops({"scale_package": "scale_package"}, str(package))
    carried = package / "scale_package" / "prebuilt"
    shipped = precompile("scale_package", ops, str(package), str(carried))
    assert [each.op for each in shipped.outcomes] == ["scale__SIZE_4", "scale__SIZE_8"]
    assert all(each.path and each.error is None for each in shipped.outcomes)
    env = {"OPKILN_MODE": "sealed", "OPKILN_CACHE_DIR": str(tmp_path / "empty")}
    assert child.run(USE, path=[package], env=env, bare=False) == "True\n"


TestSized = op_tests(sized, lambda make, size: (make(size, 4),), sizes=(0, 7))
