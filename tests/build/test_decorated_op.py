"""``@opkiln.op``: what one function and one source give."""

from __future__ import annotations

import functools
import warnings
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import child, forks
from torch import Tensor

import opkiln
from opkiln.errors import CompileError, DifferenceError, FallbackWarning, LoadError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# One line differs from test to test: what the kernel computes.
SOURCE = """
#include <opkiln/op.h>
using opk::Tensor;

Tensor {name}(const Tensor& x, const Tensor& y, double scale) {{
  opk::check_same_shape(x, y);
  opk::check_contiguous(x, y);
  Tensor out = opk::empty_like(x);
  const float *a = x.data<const float>(), *b = y.data<const float>();
  float* o = out.data<float>();
  for (int64_t i = 0; i < x.numel(); ++i) o[i] = {value};
  return out;
}}
OPKILN_OP({name}, cpu);
"""
RIGHT = "a[i] + static_cast<float>(scale) * b[i]"


@functools.cache
def scaled(name: str, value: str = RIGHT) -> Any:
    """A decorated ``x + scale * y`` whose kernel computes ``value``; built once for each name."""

    def function(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * y

    function.__name__ = function.__qualname__ = name
    return opkiln.op(source=SOURCE.format(name=name, value=value), namespace="decorated")(function)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[str]]:
    """Notes each call of a reference."""

    def watched(op: Any) -> list[str]:
        calls: list[str] = []
        entrance = op.load.__self__._entrance
        plain = entrance._function

        def noted(*args: Any, **kwargs: Any) -> Any:
            if type(args[0]) is Tensor:  # not one of a trace
                calls.append("reference")
            return plain(*args, **kwargs)

        monkeypatch.setattr(entrance, "_function", noted)
        return calls

    return watched


def test_first_call_builds_and_every_call_is_native(served: Callable[[Any], list[str]]) -> None:
    op = scaled("first_call")
    calls = served(op)
    x, y = torch.randn(100), torch.randn(100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(op(x, y, 2.0), x + 2.0 * y)
    assert torch.equal(op(y=y, x=x), x + y)
    assert torch.equal(torch.ops.decorated.first_call(x, y, 0.5), x + 0.5 * y)
    assert calls == []
    assert op.load("cpu")
    assert op.builder.NAME == "first_call"


@functools.cache
def squared(name: str) -> Any:
    """``x * x + scale * y``: its gradient has a gradient."""

    def function(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return x * x + scale * y

    function.__name__ = function.__qualname__ = name
    text = SOURCE.format(name=name, value="a[i] * a[i] + static_cast<float>(scale) * b[i]")
    return opkiln.op(source=text, namespace="decorated")(function)


def test_gradients_are_those_of_the_reference_also_the_second() -> None:
    op = squared("graded")
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    (gx, gy) = torch.autograd.grad(op(x, y, 3.0).sum(), (x, y), create_graph=True)
    torch.testing.assert_close(gx, 2 * x)
    torch.testing.assert_close(gy, torch.full((5,), 3.0))
    (second,) = torch.autograd.grad(gx.sum(), x)
    torch.testing.assert_close(second, torch.full((5,), 2.0))


def test_gradient_is_only_for_what_needs_one() -> None:
    op = squared("graded")
    x, y = torch.randn(5, requires_grad=True), torch.randn(5)
    out = op(x, y)
    out.sum().backward()
    assert y.grad is None
    torch.testing.assert_close(x.grad, 2 * x.detach())
    with torch.no_grad():
        assert not op(x, y).requires_grad
    assert not op(x.detach(), y).requires_grad


def test_authors_backward_takes_the_place_of_the_references() -> None:
    op = scaled("with_backward")

    @op.backward  # type: ignore[untyped-decorator]
    def backward(grad: Tensor, x: Tensor, y: Tensor, scale: float, *, output: Tensor) -> Any:
        assert torch.equal(output, x + scale * y)
        return 10 * grad, 20 * grad, None

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    op(x, y).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 10.0))
    assert torch.equal(y.grad, torch.full((3,), 20.0))


def test_forward_mode_and_transforms_use_the_reference_and_never_give_zeros() -> None:
    op = squared("transformed")
    x, y = torch.randn(4), torch.randn(4)
    value, tangent = torch.func.jvp(lambda v: op(v, y), (x,), (torch.ones(4),))
    torch.testing.assert_close(value, x * x + y)
    torch.testing.assert_close(tangent, 2 * x)
    torch.testing.assert_close(torch.func.grad(lambda v: op(v, y).sum())(x), 2 * x)
    many = torch.randn(3, 4)
    torch.testing.assert_close(torch.vmap(lambda v: op(v, y))(many), many * many + y)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(4))
        for call in (op, torch.ops.decorated.transformed):
            out = torch.autograd.forward_ad.unpack_dual(call(dual, y))
            torch.testing.assert_close(out.tangent, 2 * x)


def test_authors_batching_rule_takes_the_place_of_the_references() -> None:
    op = scaled("batched")

    @op.vmap  # type: ignore[untyped-decorator]
    def rule(info: Any, in_dims: Any, x: Tensor, y: Tensor, scale: float) -> Any:
        return torch.full((info.batch_size, 4), 7.0), 0

    out = torch.vmap(lambda v: op(v, torch.ones(4), 1.0))(torch.randn(3, 4))
    assert torch.equal(out, torch.full((3, 4), 7.0))


def test_autocast_changes_neither_native_nor_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_MODE", "reference")

    @opkiln.op(source="", namespace="decorated")
    def product(x: Tensor) -> Tensor:
        return x @ x

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = product(x)
        assert (x @ x).dtype == torch.bfloat16
    assert out.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad((x @ x).sum(), x)[0])


def test_first_call_may_be_inside_a_compiled_function(served: Callable[[Any], list[str]]) -> None:
    op = squared("compiled_first")
    calls = served(op)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        return op(x, y, 2.0).relu()

    x, y = torch.randn(6, requires_grad=True), torch.randn(6)
    step(x, y).sum().backward()
    torch.testing.assert_close(step(x, y), (x * x + 2 * y).relu())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(x * x + 2 * y > 0, 2 * x, 0.0).detach())
    assert op.load("cpu")
    assert calls == []


def test_torch_accepts_the_registration() -> None:
    op = squared("graded")
    x, y = torch.randn(6), torch.randn(6)
    for args in ((x, y, 2.0), (x.requires_grad_(), y, 2.0)):
        torch.library.opcheck(op.overload, args)


def test_op_that_writes_changes_versions_and_has_no_gradient() -> None:
    text = """
    #include <opkiln/op.h>
    void add_one(opk::Tensor& x) {
      opk::check_contiguous(x);
      float* p = x.data<float>();
      for (int64_t i = 0; i < x.numel(); ++i) p[i] += 1;
    }
    OPKILN_OP(add_one, cpu);
    """

    @opkiln.op(source=text, mutates="x", namespace="decorated")
    def add_one(x: Tensor) -> None:
        x.add_(1)

    x = torch.zeros(3)
    version = x._version
    add_one(x)
    assert torch.equal(x, torch.ones(3))
    assert x._version > version
    torch.library.opcheck(add_one.overload, (torch.zeros(3),))
    with pytest.raises(RuntimeError, match="add_one writes to x, so it has no gradient"):
        add_one(torch.zeros(3, requires_grad=True))
    with pytest.raises(SpecError, match="has no gradient"):
        add_one.backward(lambda grad: grad)


def test_decorating_again_replaces_source_schema_and_gradient() -> None:
    old = squared("again")
    x, y = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(old(x, y), x * x + y)

    text = """
    #include <opkiln/op.h>
    opk::Tensor again(const opk::Tensor& x) {
      opk::Tensor out = opk::empty_like(x);
      for (int64_t i = 0; i < x.numel(); ++i) out.data<float>()[i] = -x.data<const float>()[i];
      return out;
    }
    OPKILN_OP(again, cpu);
    """

    def function(x: Tensor) -> Tensor:
        return -x

    function.__name__ = function.__qualname__ = "again"
    function.__module__ = __name__
    # As a notebook does it: the same name, in the same place.
    function.__qualname__ = old.__qualname__
    new = opkiln.op(source=text, namespace="decorated")(function)
    v = torch.randn(4, requires_grad=True)
    assert torch.equal(new(v), -v)
    assert torch.ops.decorated.again(v).requires_grad, "the overload with a gradient comes first"
    assert new.load("cpu")
    new(v).sum().backward()
    assert torch.equal(v.grad, torch.full((4,), -1.0))
    assert torch.equal(torch.ops.decorated.again(x), -x)
    assert torch.equal(torch.compile(new, fullgraph=True, backend="eager")(x), -x)


def test_function_of_no_module_can_be_an_op() -> None:
    def made(x: Tensor) -> Tensor:
        return x + 1

    made.__module__ = None  # type: ignore[assignment]
    op = opkiln.op(source={"cuda": "// never compiled here"}, namespace="decorated")(made)
    assert op.builder().distribution == "main"
    with pytest.warns(FallbackWarning):
        assert torch.equal(op(torch.zeros(2)), torch.ones(2))


def test_a_redefined_cell_that_does_not_compile_falls_back_as_a_first_one_does() -> None:
    """And the one after it is native again; each failure is told."""
    x = torch.randn(3)
    for value, right in ((RIGHT, True), ("no C++", False), ("nor this", False), (RIGHT, True)):
        op = scaled("cell", value)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.allclose(op(x, x, 0.5), x + 0.5 * x)
        assert op.load() is right
        assert ["does not compile" in str(each.message) for each in told] == [True] * (not right)
    edited = scaled("cell", "no C++")
    with pytest.raises(CompileError):
        edited.builder().jit_load()


def test_two_functions_of_one_name_are_refused() -> None:
    scaled("only_once")

    def only_once(x: Tensor) -> Tensor:
        return x

    only_once.__qualname__ = "elsewhere"
    with pytest.raises(SpecError, match=r"decorated::only_once is declared in .* already"):
        opkiln.op(source="", namespace="decorated")(only_once)


def test_signature_that_differs_from_the_annotations_is_an_error_before_the_first_call() -> None:
    text = SOURCE.replace("double scale", "int64_t scale").format(
        name="other_signature", value=RIGHT
    )

    @opkiln.op(source=text, namespace="decorated")
    def other_signature(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * y

    x = torch.randn(3)
    with pytest.warns(FallbackWarning, match=r"(?s)int.*float"):
        got = other_signature(x, x, 0.5)
    assert torch.equal(got, x + 0.5 * x)
    assert not other_signature.load("cpu")


def test_device_without_sources_is_served_by_the_reference_and_the_user_is_told() -> None:
    @opkiln.op(source={"cuda": "// never compiled here"}, namespace="decorated")
    def only_cuda(x: Tensor) -> Tensor:
        return x + 1

    with pytest.warns(FallbackWarning, match="for cuda, rocm alone") as told:
        assert torch.equal(only_cuda(torch.zeros(2)), torch.ones(2))
    assert told[0].filename == __file__, "the line that calls the op, not one of torch's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        only_cuda(torch.zeros(2))
    with pytest.raises(LoadError, match="has no native version for cpu"):
        only_cuda.check(torch.zeros(2))


# What `check` and OPKILN_MODE=check find


def test_check_finds_the_first_difference() -> None:
    op = scaled("short_tail", f"i + 1 < x.numel() ? {RIGHT} : 0.0f")
    x, y = torch.randn(8), torch.randn(8)
    with pytest.raises(DifferenceError) as found:
        op.check(x, y, 2.0)
    for words in ("1 of 8 values differ", "at index [7]", "x = float32[8] on cpu", "scale = 2.0"):
        assert words in str(found.value)


def test_check_gives_the_native_result_if_all_is_well() -> None:
    op = scaled("first_call")
    x, y = torch.randn(8), torch.randn(8)
    assert torch.equal(op.check(x, y), x + y)


def test_check_finds_a_result_that_is_an_argument() -> None:
    text = """
    #include <opkiln/op.h>
    opk::Tensor aliased(const opk::Tensor& x) { return x; }
    OPKILN_OP(aliased, cpu);
    """

    @opkiln.op(source=text, namespace="decorated")
    def aliased(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(DifferenceError, match="the result shares memory with argument x"):
        aliased.check(torch.randn(3))


def test_opkiln_check_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_MODE", "check")
    right, wrong = scaled("first_call"), scaled("always_wrong", value="a[i]")
    x, y = torch.randn(8), torch.randn(8)
    assert torch.equal(right(x, y), x + y)
    compiled = torch.compile(wrong, backend="aot_eager")
    for call in (wrong, torch.ops.decorated.always_wrong, compiled):
        with pytest.raises(DifferenceError, match="native and reference differ"):
            call(x, y)


# Packages

PACKAGE = {
    "__init__.py": """import opkiln
from torch import Tensor

@opkiln.op("twice.cpp")
def twice(x: Tensor) -> Tensor:
    return x * 2
""",
    "twice.cpp": """#include <opkiln/op.h>
opk::Tensor twice(const opk::Tensor& x) {
  opk::Tensor out = opk::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data<float>()[i] = 2 * x.data<const float>()[i];
  return out;
}
OPKILN_OP(twice, cpu);
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    home = tmp_path / "site" / "twice_package"
    home.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (home / name).write_text(text)
    info = tmp_path / "site" / "twice_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twice-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opkiln.ops]\ntwice_package = twice_package\n")
    return tmp_path / "site"


def run(package: Path, *argv: str) -> str:
    env = {**child.environment(), "PYTHONPATH": str(package)}
    done = child.finish(forks.Fork(argv, stdout=PIPE, stderr=PIPE, text=True, env=env))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands_find_a_packages_ops_by_one_line(package: Path) -> None:
    assert "twice" in run(package, "-m", "opkiln", "build", "twice", "--target", "cpu")
    assert "twice" in run(package, "-m", "opkiln", "explain", "twice")
    found = run(package, "-c", "import opkiln; print(opkiln.ALL_OPS['twice'].__name__)")
    assert found.strip() == "TwiceBuilder"


def test_emulated_op_runs_its_cuda_kernel_on_the_cpu(served: Callable[[Any], list[str]]) -> None:
    text = """
    #include <opkiln/op.h>
    __global__ void negate(const float* x, float* out, int64_t count) {
      const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
      if (i < count) out[i] = -x[i];
    }
    opk::Tensor emulated(const opk::Tensor& x) {
      opk::Tensor out = opk::empty_like(x);
      const float* a = x.data<const float>();
      opk::launch(negate, (x.numel() + 31) / 32, 32, 0, a, out.data<float>(), x.numel());
      return out;
    }
    OPKILN_OP(emulated, cuda);
    """

    @opkiln.op(source={"cuda": text}, emulate=True, namespace="decorated")
    def emulated(x: Tensor) -> Tensor:
        return -x

    calls = served(emulated)
    assert torch.equal(emulated(torch.arange(100.0)), -torch.arange(100.0))
    assert emulated.load("cpu")
    assert calls == []
