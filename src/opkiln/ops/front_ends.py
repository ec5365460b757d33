"""Shared by front ends of ops: a check, and the call of an op."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.loading.register import at_trace_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.builder.base import OpBuilder

_REFUSED = r", expected | is (?:not )?on | is not contiguous|, \w+ has "


def check_dense(x: Tensor) -> None:
    """Raises UsageError for another layout."""
    if x.layout != torch.strided:
        raise ArgumentError(f"x is not dense: its layout is {x.layout}", hint="x.to_dense()")


def runs_cuda_kernels(x: Tensor, builder: type[OpBuilder]) -> bool:
    """Whether a call with ``x`` runs the op's CUDA kernels: on a GPU, or in the emulator."""
    return x.device.type == "cuda" or _emulates(builder)


@at_trace_time  # it reads settings, which torch.compile cannot trace
def _emulates(builder: type[OpBuilder]) -> bool:
    return builder.emulates()


def call_checked(function: Callable[..., Any], *args: Any) -> Any:
    """Call an op, or a function that checks arguments. What it refuses is the caller's to mend, so
    that is a UsageError: a wrong device, dtype or size, by name."""
    if torch.compiler.is_compiling():
        return function(*args)
    try:
        return function(*args)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if type(error) is RuntimeError and re.search(_REFUSED, said):
            kind = ArgumentTypeError if "dtype" in said else ArgumentError
            raise kind(said) from error
        raise
