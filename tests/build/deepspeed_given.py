"""Shared by the tests of DeepSpeed's modules over opkiln's ops: the store that has the ops, and for
``transformer_inference`` random tensors of a dtype, and how near to float64 results must be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

BATCH, SEQ, HIDDEN, HEADS = 2, 5, 48, 4
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
UNIT = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
ABSENT = torch.empty(1)  # DeepSpeed's way to give no mask, no alibi and no scales


@pytest.fixture
def warm(catalogue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the fixture of that name: ops come from the store of the catalogue's tests."""
    monkeypatch.setenv("OPKILN_CACHE_DIR", str(catalogue))


class Given:
    def __init__(self, kind: str) -> None:
        self.dtype = TYPES[kind]

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(shape or (BATCH, SEQ, HIDDEN), dtype=torch.float32).to(self.dtype)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        return (torch.randn(outputs, inputs) / math.sqrt(inputs)).to(self.dtype)

    def agrees(self, found: Tensor, expected: Tensor, units: float = 1) -> None:
        assert found.dtype == self.dtype
        unit = UNIT[self.dtype] * units
        torch.testing.assert_close(found.double(), expected, rtol=unit, atol=unit)
