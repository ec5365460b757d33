"""Products with packed weights: the kernel in the emulator against float64, and the front end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from mixed_gemm_cases import CASES, Case, check, expected, make
from torch import Tensor
from torch.nn import functional

from opkiln import quant
from opkiln.errors import UsageError
from opkiln.nn import inference
from opkiln.ops.mixed_gemm.functions import packed_gemm
from opkiln.ops.mixed_gemm.gemm import fits
from opkiln.ops.mixed_gemm.op import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = {each.name: each.kind for each in FORMATS}
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "half"}
# Both types where decoding differs.
KERNELS = [
    *((form, dtype) for form in ("e3m2", "int8", "e4m3") for dtype in NAMES),
    ("int4", torch.bfloat16), ("plain", torch.float16), ("e5m2", torch.float16),
]  # fmt: skip


@pytest.fixture(scope="module")
def emulated() -> Iterator[Any]:
    """The op, whose kernels the emulator runs on CPU tensors."""
    packed_gemm.builder.EMULATE = True
    yield packed_gemm
    packed_gemm.builder.EMULATE = False


@pytest.mark.parametrize(("form", "dtype"), KERNELS)
def test_the_kernel_is_within_rounding_of_float64(
    emulated: Any, form: str, dtype: torch.dtype
) -> None:
    assert emulated.load("cpu", CODES=KINDS[form], T=NAMES[dtype])
    for case in CASES:
        check(case, form, dtype, emulated)


def test_every_code_is_decoded(emulated: Any) -> None:
    for form, bits in (("e3m2", 6), ("int8", 8), ("int4", 4)):
        dtype = torch.bfloat16
        call, _ = make(Case(1, 16, 256), form, dtype)
        codes = torch.randint(0, 256, call.codes.shape, dtype=torch.uint8).view(call.codes.dtype)
        call = call._replace(codes=codes, scales=torch.ones_like(call.scales))
        x = torch.zeros(256, 256, dtype=dtype)
        x.fill_diagonal_(1)
        out = torch.cat([emulated(*call._replace(x=part)) for part in x.split(32)])
        assert torch.equal(out, packed_gemm.reference(*call._replace(x=x))), (form, bits)
