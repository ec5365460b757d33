"""``opkiln.testing.op_tests``: a right op passes, and each planted mistake is found."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest
from sample import child

if TYPE_CHECKING:
    from pathlib import Path

# A row's sum of squares, times a factor: a loop with a tail, a gradient, and a shape of its own.
KERNEL = """
#include <opkiln/op.h>
using opk::Tensor;

Tensor rows(const Tensor& x, double factor) {{
  {contiguous}
  Tensor out = {out};
  const float* a = x.data<const float>();
  float* o = out.data<float>();
  const int64_t columns = x.size(1);
  for (int64_t i = 0; i < x.size(0); ++i) {{
    float sum = 0;
    for (int64_t j = 0; j < {columns}; ++j) sum += a[i * columns + j] * a[i * columns + j];
    o[i * {step}] = {sign} static_cast<float>(factor) * sum;
  }}
  return out;
}}
OPKILN_OP(rows, cpu);
"""
RIGHT = {
    "contiguous": "opk::check_contiguous(x);",
    "out": "opk::empty({x.size(0)}, x.dtype(), x.device())",
    "columns": "columns",
    "step": "1",
    "sign": "",
}
PYTHON = """
import opkiln
from opkiln.testing import op_tests
from torch import Tensor

@opkiln.op("rows.cpp", namespace="suite")
def rows(x: Tensor, factor: float) -> Tensor:
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


def run(where: Path, changes: dict[str, str], more: str) -> str:
    (where / "rows.cpp").write_text(KERNEL.format(**{**RIGHT, **changes}))
    (where / "test_rows.py").write_text(PYTHON.format(more=textwrap.dedent(more)))
    code = (
        "import os, sys, pytest; os.chdir(sys.argv[1]); "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_rows.py']))"
    )
    done = child.finish(child.start(code, str(where), bare=False), timeout=300)
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


def test_a_right_op_passes_all(tmp_path: Path) -> None:
    said = run(tmp_path, {}, "")
    assert said.startswith("0\n"), said
    assert "failed" not in said


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    changes, more, words = MISTAKES[mistake]
    said = run(tmp_path, changes, more)
    assert said.startswith("1\n"), said
    assert words in said
