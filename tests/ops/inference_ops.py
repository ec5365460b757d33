"""The op transformer_inference for tests: its CPU version, its CUDA kernels in the emulator, and
what their results are held against."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in import emulated_functions
from torch import Tensor

from opkiln.nn import inference as functions

NAMES = [each for each in functions.__all__ if hasattr(getattr(functions, each), "overload")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Two units of the last digit, relative to the result.
_ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class _Emulated:
    """The functions by name. A family is built when a test first asks for one of its functions."""

    def __getattr__(self, name: str) -> Any:
        builder = getattr(functions, name).builder
        return getattr(_emulated_family(builder.NAME), name)


@cache
def _emulated_family(name: str) -> Any:
    every = (getattr(functions, each) for each in NAMES)
    return emulated_functions(*(each for each in every if name == each.builder.NAME))


def version(kind: str) -> Any:
    """The functions: ``native``, ``emulated`` or ``reference``."""
    if kind == "emulated":
        return _Emulated()
    if kind == "reference":
        named = {name: getattr(functions, name).reference for name in NAMES}
        return SimpleNamespace(**named)
    if not functions.rms_norm.load("cpu", dtype="float32"):
        pytest.skip("there is no compiler")
    return functions


def each_dtype(*kinds: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Any:
    """Gives a test each version (as the fixture ``op``) with each dtype. In fp16 the CPU has other
    libraries, which differ from those for bf16 by how elements are converted: in full runs."""
    late = {("native", torch.float16): pytest.mark.full}
    cells = [
        pytest.param(kind, dtype, marks=late.get((kind, dtype), ()), id=f"{kind}-{dtype}")
        for kind in kinds or ("native", "emulated", "reference")
        for dtype in dtypes
    ]
    return pytest.mark.parametrize(("op", "dtype"), cells, indirect=["op"])


def assert_rounded(got: Tensor, exact: Tensor, *, slack: float = 0.0) -> None:
    """``got`` is ``exact``, which is in float64, but for rounding. ``slack`` is an error that comes
    from the arguments' own size."""
    assert got.shape == exact.shape
    allowed = _ROUNDING[got.dtype] * (exact.abs() + slack) + torch.finfo(got.dtype).tiny
    wrong = (got.double() - exact).abs() > allowed
    wrong &= got != exact.to(got.dtype)  # infinity less infinity is NaN
    wrong |= got.isnan() != exact.to(got.dtype).isnan()
    at = wrong.nonzero()
    assert not len(at), f"{got[tuple(at[0])]} at {at[0].tolist()}, not {exact[tuple(at[0])]}"
