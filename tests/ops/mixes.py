"""The dtypes that tensors of an optimizer's op have together."""

from __future__ import annotations

from typing import Any

import pytest
from adam_oracle import BF16, DTYPES, F16, F32

# Of parameters, and whether there are masters in fp32; of parameters and their states.
MASTERS = [(F32, False), (BF16, False), (BF16, True), (F16, False), (F16, True)]
STATES = [(F32, F32), (BF16, F32), (BF16, BF16), (F16, F32), (F16, F16)]


def with_gradients(mixes: list[Any]) -> list[Any]:
    """Each mix with gradients of each dtype. In every run each mix and each dtype comes once."""
    return [
        pytest.param(*mix, grad, marks=[pytest.mark.full] * ((i + j) % 3 > 0))
        for i, mix in enumerate(mixes)
        for j, grad in enumerate(DTYPES)
    ]
