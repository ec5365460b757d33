"""Decorated ops in exported programs, and in what AOTInductor compiles of them."""

from __future__ import annotations

import importlib
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sample import child
from torch.export import Dim

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = '''
from torch import Tensor

import opkiln

SQUARED_ADD = """
#include <opkiln/op.h>
using opk::Tensor;

Tensor squared_add(const Tensor& x, const Tensor& y, double scale) {
  opk::check_same_shape(x, y);
  opk::check_contiguous(x, y);
  Tensor out = opk::empty_like(x);
  const float *a = x.data<const float>(), *b = y.data<const float>();
  float* o = out.data<float>();
  for (int64_t i = 0; i < x.numel(); ++i) o[i] = a[i] * a[i] + static_cast<float>(scale) * b[i];
  return out;
}
OPKILN_OP(squared_add, cpu);
"""
SHIFT = """
#include <opkiln/op.h>

void shift(opk::Tensor& x, double by) {
  opk::check_contiguous(x);
  float* a = x.data<float>();
  for (int64_t i = 0; i < x.numel(); ++i) a[i] += static_cast<float>(by);
}
OPKILN_OP(shift, cpu);
"""


@opkiln.op(source=SQUARED_ADD)
def squared_add(x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
    return x * x + scale * y


@opkiln.op(source=SHIFT, mutates="x")
def shift(x: Tensor, by: float) -> None:
    x.add_(by)
'''

# What another process does with the exported program, two sizes of input, and the compiled model.
USE = """
import sys
import torch

exported, samples, *compiled = sys.argv[1:]
for each in compiled:
    try:
        torch._inductor.aoti_load_package(each)
    except RuntimeError as error:
        print(error)
import exported_ops

models = [torch._inductor.aoti_load_package(each) for each in compiled]
for x, y, expected in torch.load(samples):
    for model in (torch.export.load(exported).module(), *models):
        assert torch.equal(model(x, y), expected)
for name in ("squared_add", "squared_add.no_grad", "shift"):
    native = torch._C._dispatch_has_kernel_for_dispatch_key(f"exported_ops::{name}", "CPU")
    print(name, "native" if native else "reference")
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a module that declares an op with a gradient, and one that writes to its
    argument. In one place for all tests: two files of one name would be two ops of one name."""
    place = tmp_path_factory.mktemp("packages")
    (place / "exported_ops.py").write_text(PACKAGE)
    return place


@pytest.fixture
def ops(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    shutil.copy(packages / "exported_ops.py", tmp_path)  # for other processes
    monkeypatch.syspath_prepend(str(packages))
    yield importlib.import_module("exported_ops")
    del sys.modules["exported_ops"]


class Model(torch.nn.Module):
    def __init__(self, ops: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.ops = ops

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.ops.squared_add(x, y, 0.5)
        out = self.ops.squared_add(out, (out * self.weight).contiguous())
        with torch.no_grad():
            shifted = out.detach().clone()
            self.ops.shift(shifted, 1.5)
        return out + shifted


def exported(ops: Any) -> tuple[Model, torch.export.ExportedProgram]:
    """A model, and its export for any number of rows."""
    model = Model(ops)
    rows = Dim("rows", min=2, max=1024)
    arguments = (torch.randn(3, 4), torch.randn(3, 4))
    shapes = ({0: rows}, {0: rows})
    return model, torch.export.export(model, arguments, dynamic_shapes=shapes)


def used_elsewhere(ops: Any, where: Path, *, compiled: bool) -> list[str]:
    """What another process prints that uses an exported model."""
    model, program = exported(ops)
    samples = []
    for rows in (2, 7):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        samples.append((x, y, model(x, y).detach()))
    torch.save(samples, where / "samples.pt")
    torch.export.save(program, where / "program.pt2")
    files = [str(where / name) for name in ("program.pt2", "samples.pt")]
    if compiled:
        files.append(torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(where / "compiled.pt2"),
            # Less time in g++: no optimization, no precompiled header for one model.
            inductor_configs={
                "aot_inductor.debug_compile": True,
                "aot_inductor.precompile_headers": False,
            },
        ))  # fmt: skip
    native = {"OPKILN_MODE": "native"}
    return child.run(USE, *files, path=[where], env=native, bare=False).splitlines()


SERVED = ["squared_add native", "squared_add.no_grad native", "shift native"]


def test_exported_model_gives_the_same_in_another_process(ops: Any, tmp_path: Path) -> None:
    assert used_elsewhere(ops, tmp_path, compiled=False) == SERVED


@pytest.mark.full  # AOTInductor compiles for half a minute
def test_compiled_model_gives_the_same_in_another_process(ops: Any, tmp_path: Path) -> None:
    missing, *served = used_elsewhere(ops, tmp_path, compiled=True)
    assert missing.startswith("Could not find schema for exported_ops::")
    assert served == SERVED


def test_exported_program_differentiates_what_needed_no_gradient_when_it_was_traced(
    ops: Any,
) -> None:
    ops.squared_add.load()
    model, program = exported(ops)
    x, y = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(program.module()(x, y).sum(), (x, y))
    for got, expected in zip(found, torch.autograd.grad(model(x, y).sum(), (x, y)), strict=True):
        torch.testing.assert_close(got, expected)


def test_compiled_graph_calls_the_overload_without_a_gradient(ops: Any) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    called: list[str] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    compiled = torch.compile(ops.squared_add, backend=aot_autograd(fw_compiler=noted))
    x, y = torch.randn(4, requires_grad=True), torch.randn(4)
    (grad,) = torch.autograd.grad(compiled(x, y).sum(), x)
    torch.testing.assert_close(grad, 2 * x.detach())
    assert "exported_ops.squared_add.no_grad" in called
    assert "exported_ops.squared_add.default" not in called
