"""Plans of a list's work in device memory: what they are without a GPU, which is to say, shapes."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

# As in plan.h: sizes in words of 8 bytes, of a count's coefficients and of an item's record, each
# with the address that goes with it.
_STEP_WORDS, _ITEM_WORDS = 9, 8
_CHUNK = 512
_LEDGER_HEAD = 4


def fake_plan(params: list[Tensor], steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A plan and its ledger, as large as those of these lists."""
    chunks = sum(-(-param.numel() // _CHUNK) for param in params)
    words = len(steps) * _STEP_WORDS + len(params) * _ITEM_WORDS + (chunks + 1) // 2
    return (
        steps[0].new_empty(words, dtype=torch.int64),
        torch.empty(_LEDGER_HEAD + 2 * len(params), dtype=torch.int64),
    )


def refuse_plan(op: str) -> NoReturn:
    """Raises RuntimeError: addresses are of use to a native op on a GPU alone."""
    raise RuntimeError(f"{op} plans steps on a GPU with its native version alone")
