"""``dtypes=`` and ``parts=`` of ``opkiln.library``, and calls that a kernel does not serve."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import opkiln
from opkiln.builder.registry import libraries
from opkiln.errors import FallbackWarning, LoadError, SpecError, UsageError
from opkiln.loading import loader

# A kernel adds a half, so that its results are told from those of the reference.
SOURCE = """
#include <opkiln/op.h>
using opk::Tensor;
Tensor dt_doubled(const Tensor& x, const opk::List<int64_t> rows) {
  OPK_SERVED(x.dim() < 3, x, " has ", x.dim(), " dimensions, and the kernel takes 2");
  Tensor out = opk::empty_like(x);
  OPK_DISPATCH(x, T, (float, double, opk::bfloat16), {
    for (int64_t i = 0; i < x.numel(); ++i) {
      out.data<T>()[i] = T(2 * float(x.data<const T>()[i]) + 0.5f + 0 * float(rows.size()));
    }
  });
  return out;
}
void dt_fill(Tensor& x, double value) {
  OPK_DISPATCH(x, T, (float, double, opk::bfloat16), {
    for (int64_t i = 0; i < x.numel(); ++i) x.data<T>()[i] = T(float(value) + 0.5f);
  });
}
Tensor dt_ones(const Tensor& like, opk::DType dtype) {
  Tensor out = opk::empty(like.sizes(), dtype, like.device());
  OPK_DISPATCH(dtype, T, (float, double, opk::bfloat16), {
    for (int64_t i = 0; i < out.numel(); ++i) out.data<T>()[i] = T(1.5f);
  });
  return out;
}
OPKILN_OP(dt_doubled, cpu);
OPKILN_OP(dt_fill, cpu);
OPKILN_OP(dt_ones, cpu);
"""
kit = opkiln.library("dt_kit", source=SOURCE, dtypes=("float32", "bfloat16"), namespace="dt")


@kit.op()
def dt_doubled(x: Tensor, rows: list[int]) -> Tensor:
    if not rows:
        raise RuntimeError("rows is empty")
    return x + x


@kit.op(mutates="x")
def dt_fill(x: Tensor, value: float) -> None:
    x.fill_(value)


@kit.op()
def dt_ones(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ones(like.shape, dtype=dtype, device=like.device)


def loaded() -> set[str]:
    return {op for _, op, _ in loader.loaded_here() if op.startswith("dt_kit")}


def test_a_process_loads_the_library_of_the_dtype_that_it_calls() -> None:
    x = torch.ones(3)
    assert torch.equal(dt_doubled(x, [1]), torch.full((3,), 2.5))
    assert loaded() == {"dt_kit__float32"}
    half = torch.ones(3, dtype=torch.bfloat16)
    for _ in range(2):
        assert torch.equal(dt_doubled(half, [1]), torch.full_like(half, 2.5))
        assert torch.equal(dt_doubled(x, [1]), torch.full((3,), 2.5))
    assert loaded() == {"dt_kit__float32", "dt_kit__bfloat16"}


def test_other_functions_of_the_library_find_it_loaded() -> None:
    dt_doubled.load("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(2, dtype=dtype)
        version = x._version
        dt_fill(x, 3.0)
        assert x.tolist() == [3.5, 3.5]
        assert x._version > version
        # A dtype among the arguments decides, not that of a tensor.
        assert dt_ones(torch.ones(2, dtype=torch.float64), dtype).tolist() == [1.5, 1.5]


def test_a_compiled_graph_runs_the_library_of_its_dtype() -> None:
    compiled = torch.compile(lambda x: dt_doubled(x, [1]) * 2, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        assert compiled(torch.ones(2, dtype=dtype)).tolist() == [5.0, 5.0]


def test_a_dtype_without_a_library_runs_as_the_reference_and_is_told() -> None:
    dt_doubled.load("cpu")
    x = torch.ones(2, dtype=torch.float64)
    why = "it has kernels for float32, bfloat16, not float64"
    with pytest.warns(FallbackWarning, match=f"op dt_doubled runs .*: {why}"):
        out = dt_doubled(x, [1])
    assert out.tolist() == [2.0, 2.0]
    assert f"the reference ran: {why}" in dt_doubled.explain().notes
    with pytest.raises(LoadError, match="not float64"):
        dt_doubled.check(x, [1])
    with pytest.warns(FallbackWarning, match="op dt_fill"):
        dt_fill(x, 3.0)
    assert x.tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("error")
def test_a_call_that_the_reference_refuses_too_is_an_error_and_no_fallback() -> None:
    with pytest.raises(RuntimeError, match="rows is empty"):
        dt_doubled(torch.ones(2, dtype=torch.float16), [])


def test_messages_of_each_dtypes_library_name_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dt_doubled.load("cpu")
    monkeypatch.setenv("OPKILN_MODE", "native")
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(RuntimeError, match="x has 3 dimensions"):
            dt_doubled(torch.ones(1, 1, 1, dtype=dtype), [1])


def test_native_mode_refuses_a_dtype_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    dt_doubled.load("cpu")
    monkeypatch.setenv("OPKILN_MODE", "native")
    with pytest.raises(RuntimeError, match="it has kernels for float32, bfloat16, not float16"):
        dt_doubled(torch.ones(2, dtype=torch.float16), [1])


def test_a_call_that_the_kernel_does_not_serve_runs_as_the_reference() -> None:
    x = torch.ones(1, 1, 2)
    dt_doubled(x[0], [1])
    why = "x has 3 dimensions, and the kernel takes 2"
    with pytest.warns(FallbackWarning, match=why):
        assert dt_doubled(x, [1, 2]).tolist() == [[[2.0, 2.0]]]
    assert f"the reference ran: {why}" in dt_doubled.explain().notes
    with pytest.raises(LoadError, match="no kernel serves these arguments") as error:
        dt_doubled.check(x, [1])
    assert error.value.why == why
    with pytest.raises(RuntimeError, match=r"^dt_doubled: rows is empty$"):
        dt_doubled(x, [])


def test_a_call_that_the_kernel_does_not_serve_has_the_gradient_of_the_reference() -> None:
    x = torch.ones(1, 1, 2, requires_grad=True)
    torch.autograd.backward(dt_doubled(x, [1]).sum())
    assert x.grad is not None
    assert x.grad.tolist() == [[[2.0, 2.0]]]


def test_threads_that_need_different_dtypes_first_get_their_libraries() -> None:
    own = opkiln.library("dt_kit", source=SOURCE, dtypes=("float32", "bfloat16"), namespace="dt")
    made = own.op()(dt_doubled.reference)
    own.op(mutates="x")(dt_fill.reference)
    own.op()(dt_ones.reference)
    found: list[Any] = []

    def call(dtype: torch.dtype) -> None:
        found.append(made(torch.ones(2, dtype=dtype), [1]).tolist())

    threads = [
        threading.Thread(target=call, args=(dtype,))
        for dtype in (torch.float32, torch.bfloat16) * 3
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [[2.5, 2.5]] * 6


def test_parts_are_libraries_of_their_own_under_one_name() -> None:
    first = opkiln.library("dt_all__first", source=SOURCE, dtypes=("float32",))
    second = opkiln.library("dt_all__second", source=SOURCE)
    whole = opkiln.library("dt_all", parts=(first, second))
    names = [name for name, _ in libraries("dt_all", whole.builder)]
    assert names == ["dt_all__first__float32", "dt_all__second"]
    with pytest.raises(UsageError, match="a library for each of its parts"):
        whole.builder().op()
    with pytest.raises(SpecError, match="has parts"):
        whole.op()


@pytest.mark.parametrize(
    "given",
    [
        {"dtypes": ("half",)},
        {"dtypes": "float32"},
        {"dtypes": ("float32", "float32")},
        {"dtypes": ("float32",), "variants": {"HEAD": (1, 2)}},
    ],
)
def test_dtypes_that_mean_nothing_are_refused(given: Any) -> None:
    with pytest.raises(SpecError, match="dtypes="):
        opkiln.library("dt_wrong", source=SOURCE, **given)


def test_an_op_says_which_of_its_variants_are_built_ahead() -> None:
    sizes = {"HEAD": (64, 80, 128), "PAGED": (False, True)}
    made = opkiln.library("dt_ahead", source=SOURCE, variants=sizes, ahead={"HEAD": (64,)})
    built = [name for name, _ in libraries("dt_ahead", made.builder, ahead=True)]
    assert built == ["dt_ahead__HEAD_64_PAGED_false", "dt_ahead__HEAD_64_PAGED_true"]
    assert len(libraries("dt_ahead", made.builder)) == 6
    with pytest.raises(SpecError, match="ahead= has HEAD=96"):
        opkiln.library("dt_ahead", source=SOURCE, variants=sizes, ahead={"HEAD": (96,)})


def test_a_library_that_is_declared_anew_has_the_new_code() -> None:
    source = """
    #include <opkiln/op.h>
    opk::Tensor dt_again(const opk::Tensor& x) {{
      opk::Tensor out = opk::empty_like(x);
      OPK_DISPATCH(x, T, (float, double), {{ out.data<T>()[0] = {value}; }});
      return out;
    }}
    OPKILN_OP(dt_again, cpu);
    """

    def dt_again(x: Tensor) -> Tensor:
        return x.clone()

    one, other = torch.float32, torch.float64
    for value, dtypes in ((1, (one, other)), (2, (one, other)), (1, (other, one))):
        given = source.format(value=value)
        made = opkiln.library("dt_anew", source=given, dtypes=("float64", "float32"))
        op = made.op()(dt_again)
        for dtype in dtypes:
            assert op(torch.zeros(1, dtype=dtype)).tolist() == [value]
        # Each library is asked for it once, and not one after the other forever.
        assert op(torch.ones(1, dtype=torch.float16)).tolist() == [1.0]
