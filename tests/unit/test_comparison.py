"""What ``op.check`` and ``op_tests`` compare: both sides get the same arguments."""

from __future__ import annotations

import pytest
import torch

from opkiln.builder.checking import copy_tensors

BASE = torch.arange(40.0)
TENSORS = {
    "every other element": BASE[::2],
    "transposed": BASE.view(8, 5).t(),
    "a part of each row": BASE.view(8, 5)[1:, 2:4],
    "one element, repeated": BASE[3].expand(4),
    "a row, repeated": BASE[5:9].expand(3, 4),
    "empty": BASE.view(8, 5)[:0, ::2],
    "a number": BASE[7],
    "conjugated": torch.complex(BASE, BASE + 1).conj()[1::3],
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_copy_has_the_values_and_strides_of_the_original(tensor: torch.Tensor) -> None:
    copy = copy_tensors(tensor)
    assert torch.equal(copy, tensor)
    if tensor.numel():
        assert copy.stride() == tensor.stride()
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_copy_of_a_list_holds_copies() -> None:
    one, text = copy_tensors([BASE[::2], "text"])
    assert one.stride() == (2,)
    assert one.data_ptr() != BASE.data_ptr()
    assert text == "text"
