"""What the script ragged checks on a GPU, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no GPU that torch can use", allow_module_level=True)

import ragged


@pytest.mark.parametrize("check", ragged.CHECKS, ids=lambda each: each.__name__)
def test_on_a_gpu(check: Any) -> None:
    check()
