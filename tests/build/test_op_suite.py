"""``opkiln.testing.op_tests``: a right op passes, and each planted mistake is found."""

from __future__ import annotations

import textwrap

import pytest
from sample import child, known, pool

# A row's sum of squares, times a factor: a loop with a tail, a gradient, and a shape of its own.
KERNEL = """
#include <opkiln/op.h>
using opk::Tensor;

Tensor rows(const Tensor& x, double factor) {{
  {contiguous}
  {dtype}
  Tensor out = {out};
  const {T}* a = x.data<const {T}>();
  {T}* o = out.data<{T}>();
  const int64_t columns = x.size(1);
  for (int64_t i = 0; i < x.size(0); ++i) {{
    {T} sum = 0;
    for (int64_t j = 0; j < {columns}; ++j) sum += a[i * columns + j] * a[i * columns + j];
    o[i * {step}] = {sign} static_cast<{T}>(factor) * sum;
  }}
  return out;
}}
OPKILN_OP(rows, cpu);
"""
RIGHT = {
    "contiguous": 'OPK_SERVED(x.is_contiguous(), "x is not contiguous");',
    "dtype": 'OPK_SERVED(x.dtype() == opk::DType::float32, "x is ", x.dtype());',
    "T": "float",
    "out": "opk::empty({x.size(0)}, x.dtype(), x.device())",
    "columns": "columns",
    "accepted": "",
    "step": "1",
    "sign": "",
}
PYTHON = """
import opkiln
from opkiln.testing import op_tests
from torch import Tensor

@opkiln.op("{name}.cpp", namespace="suite_{name}")
def rows(x: Tensor, factor: float) -> Tensor:
    {accepted}
    return factor * (x * x).sum(1)

{more}

def samples(make, size):
    return make(5, size), 0.5

TestRows = op_tests(rows, samples, sizes=(0, 1, 3, 17, 64))
"""
WRONG_GRADIENT = """
@rows.backward
def backward(grad, x, factor):
    return factor * grad[:, None] * x, None
"""
# The change, the extra Python, and what the failures say.
MISTAKES = {
    "wrong sign": ({"sign": "-"}, "", "native and reference differ: the result is -"),
    "missing contiguous": ({"contiguous": ""}, "", "not_contiguous"),
    "refused strides": (
        {"contiguous": "opk::check_contiguous(x);"}, "", "native: rows: x is not contiguous",
    ),
    "refused dtypes": ({"dtype": ""}, "", "native: rows: x has dtype float64, expected float32"),
    "dtypes of the kernel alone": (
        {"accepted": "assert x.dtype.is_floating_point, x.dtype", "dtype": "", "T": "int64_t"},
        "", "the reference refuses arguments that native accepts",
    ),
    "off by one at the tail": ({"columns": "columns - columns % 2"}, "", "at index [0]"),
    "wrong gradient": ({}, WRONG_GRADIENT, "gradient: native and reference differ"),
    "wrong dtype": (
        {"out": "opk::empty({x.size(0)}, opk::DType::float64, x.device())",},
        "", "expected float32",
    ),
    "wrong stride": (
        {"out": "opk::empty_strided({x.size(0)}, {2}, x.dtype(), x.device())", "step": "2"},
        "", "has strides (2,), not (1,)",
    ),
}  # fmt: skip


# One process for all, each with a module and a namespace of its own. A form feed is before each,
# and the exit status of its run ends it. That a right op passes what needs torch's compiler, which
# takes seconds to import: test_variants.py.
RUN = """
import os, sys, pytest
os.chdir(sys.argv[1])
for name in sys.argv[2:]:
    print("\\f" + name, flush=True)
    quick = ["-p", "no:cacheprovider", "-k", "not compiled and not registration"]
    print(int(pytest.main(["-q", *quick, f"test_{name}.py"])), flush=True)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest says of a right op, and of each mistake, by name."""
    where = tmp_path_factory.mktemp("suite")
    names = {}
    for number, (title, (changes, more, _)) in enumerate(
        {"right": ({}, "", ""), **MISTAKES}.items()
    ):
        name = names[title] = f"rows{number}"
        (where / f"{name}.cpp").write_text(KERNEL.format(**{**RIGHT, **changes}))
        accepted = {**RIGHT, **changes}["accepted"]
        text = PYTHON.format(more=textwrap.dedent(more), name=name, accepted=accepted)
        (where / f"test_{name}.py").write_text(text)
    store = known.make_store(where / "store")
    env = {"OPKILN_CACHE_DIR": str(store), "OPKILN_STORE_LAYERS": str(pool.LAYER)}
    started = child.start(RUN, str(where), *names.values(), env=env, bare=False)
    parts = child.finish(started, timeout=600).stdout.split("\f")[1:]
    pool.add(store)
    return dict(zip(names, parts, strict=True))


def test_a_right_op_passes_all(said: dict[str, str]) -> None:
    assert said["right"].endswith("\n0\n"), said["right"]
    assert "failed" not in said["right"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, said: dict[str, str]) -> None:
    assert said[mistake].endswith("\n1\n"), said[mistake]
    assert MISTAKES[mistake][2] in said[mistake]
