"""The two forms in which tests call the functions of ``opkiln.nn.ragged``."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from stand_in import emulated_functions

from opkiln.ops.ragged_device_ops.functions import gating, paged, rows

FUNCTIONS = (
    paged.listed_blocks, paged.paged_kv_copy, paged.paged_kv_rotary, gating.top_k_gating,
    rows.moe_scatter, rows.moe_gather, rows.ragged_embedding, rows.logits_gather,
)  # fmt: skip

REFERENCES = SimpleNamespace(**{each.__name__: each.reference for each in FUNCTIONS})


@cache
def kernels() -> Any:
    """The CUDA kernels, run by the emulator. Built once in a process."""
    return emulated_functions(*FUNCTIONS)
