"""An index, offset or length without a place is an error that names the argument, and nothing was
written by then."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bad_indices import INDEXED, copied, wrong_calls
from stand_in import emulated_functions

from opkiln.loading import loader
from opkiln.ops.kv_attention.functions import kv_attention
from opkiln.ops.mixed_gemm.functions import packed_gemm
from opkiln.ops.ragged_device_ops.functions import gating, paged, rows
from opkiln.ops.random_ltd import functions as ltd
from opkiln.ops.transformer_inference.functions import rotary

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = (
    gating,
    paged,
    rows,
    ltd,
    rotary,
)


@cache
def kernels(builder: Any) -> Any:
    """The functions of a library with CUDA kernels that the emulator runs."""
    found = {name: each for module in MODULES for name, each in vars(module).items()
             if hasattr(each, "reference") and each.builder is builder}  # fmt: skip
    return emulated_functions(*found.values())


@contextmanager
def form_of(function: Any, form: str) -> Iterator[Any]:
    if form == "reference":
        yield function.reference
    elif form == "native":
        one = {"dtype": "float32"} if function.builder.PARAMETERS.by_dtype else {}
        if not function.load("cpu", **one):
            pytest.skip("there is no native version for the CPU")
        yield function
    elif function in (kv_attention, packed_gemm):
        loader.forget_references()  # there is no native version for the CPU but this one
        function.builder.EMULATE = True
        yield function
        function.builder.EMULATE = False
    else:
        yield getattr(kernels(function.builder), function.__name__)


@pytest.mark.parametrize("form", ["reference", "native", "emulated"])
@pytest.mark.parametrize("name", INDEXED)
def test_a_place_that_is_not_there_is_refused(name: str, form: str) -> None:
    indexed = INDEXED[name]
    with form_of(indexed.function, form) as call:
        call(**copied(indexed.given))
        for wrong in wrong_calls(indexed):
            before = copied(wrong.given)
            with pytest.raises(RuntimeError) as caught:
                call(**wrong.given)
            if form == "emulated":
                continue  # a kernel stops in the middle
            assert wrong.name in str(caught.value), (wrong.value, str(caught.value))
            for each, tensor in before.items():
                if isinstance(tensor, torch.Tensor):
                    assert torch.equal(tensor, wrong.given[each]), (wrong.name, wrong.value, each)
