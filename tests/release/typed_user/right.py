"""A user's module, as ``mypy --strict`` must take it: it sees opkiln's types, not Any."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor

import opkiln
from opkiln.errors import BuildError, OpkilnError


@opkiln.op("scaled_add.cpp", cuda="scaled_add.cu")
def scaled_add(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """x + scale * y"""
    return x + scale * y


class LegacyBuilder(opkiln.CUDAOpBuilder):
    NAME = "legacy"

    def sources(self) -> list[str]:
        return ["csrc/legacy.cpp", "csrc/legacy.cu"]


def train(model: torch.nn.Module) -> str:
    optimizer = opkiln.optim.CPUAdam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    optimizer.step()
    assert_type(scaled_add(torch.ones(2), torch.ones(2), scale=0.5), Tensor)
    assert_type(scaled_add.check(torch.ones(2), torch.ones(2)), Tensor)
    assert_type(scaled_add.load("cpu"), bool)
    assert_type(opkiln.__version__, str)
    assert_type(opkiln.get_accelerator().device_count(), int)
    with opkiln.settings.override(mode="cached"):
        return str(opkiln.explain("cpu_adam"))


def careful(error: OpkilnError) -> tuple[str, int]:
    if isinstance(error, BuildError):
        return error.log, error.exit_code
    return error.hint, error.exit_code
