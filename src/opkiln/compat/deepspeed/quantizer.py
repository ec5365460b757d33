"""DeepSpeed's module ``quantizer``, over opkiln's op ``deepspeed_quantizer``.

Levels, scales, offsets and sums equal DeepSpeed's, bit for bit, except where its kernels read the
wrong data (docs/deepspeed.md). reference.py of the op says how each is computed.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import takes
from opkiln.errors import UsageError
from opkiln.ops.checks import call_checked
from opkiln.ops.deepspeed_quantizer import functions
from opkiln.ops.deepspeed_quantizer.op import kit


class QuantizationType(IntEnum):
    """Levels around 0, or around the middle of each group."""

    Symmetric = 0
    Asymmetric = 1


class Quantizer:
    """``quantizer``: int8 and int4 by groups, for weights and for compressed all-reduce. Its
    functions raise UsageError, naming the argument."""

    QuantizationType = QuantizationType
    Symmetric = QuantizationType.Symmetric
    Asymmetric = QuantizationType.Asymmetric

    def __init__(self, _module: object) -> None:
        kit.builder().load()

    def quantize(self, x: Tensor, groups: int, bits: int, kind: int) -> list[Tensor]:
        """Levels, in the tensor's shape (the last dimension halved for four bits), and the
        parameters of the groups."""
        size = _size(x.numel(), groups, bits)
        filled = _count_loaded(size, 8 if size <= 128 else 16, 1, 256)
        levels, params = _quantize(x, groups, bits, kind, filled > size, (1, 1, 1))
        return [levels.view(_scale_last_dim(x, bits, 8)), params]

    def dequantize(
        self, levels: Tensor, params: Tensor, *given: int, dtype: torch.dtype = torch.float16
    ) -> Tensor:
        """The dequantized numbers. ``given``: groups, bits and kind."""
        groups, bits, kind = given
        _check_bits(bits)
        _size(levels.numel() * 8 // bits, groups, bits)
        function = functions.deepspeed_dequantize
        tensors = (levels.contiguous(), params.contiguous())
        flat: Tensor = call_checked(function, *tensors, groups, bits, kind == self.Symmetric, dtype)
        return flat.view(_scale_last_dim(levels, 8, bits))

    dequantize_fp32 = partialmethod(dequantize, dtype=torch.float32)

    def _dequantize_unsigned(
        self, bits: int, data: Tensor, scales: Tensor, least: Tensor, groups: int, size: int
    ) -> Tensor:
        """``level / scale + least``, one row per group. Levels are unsigned, of four bits two per
        byte. Computed in fp16: each operation rounds, as in DeepSpeed."""
        levels = data.reshape(-1).view(torch.uint8)
        if bits == 4:
            levels = torch.stack([levels >> 4, levels & 15], dim=1)
        if levels.numel() != groups * size:
            raise UsageError(
                f"data_in has {levels.numel()} elements, expected num_group * group_size = "
                f"{groups * size}"
            )
        rows = levels.reshape(groups, size).half()
        return rows.div_(scales.reshape(-1, 1).half()).add_(least.reshape(-1, 1).half())

    dequantize_int4_to_half_experimental = partialmethod(_dequantize_unsigned, 4)
    dequantize_int8_to_half_experimental = partialmethod(_dequantize_unsigned, 8)

    @takes("x groups bits kind pipeline_size nodes devices_per_node")
    def swizzle_quant(self, given: Any) -> list[Tensor]:
        """Levels, in one dimension, and parameters of the groups. They are in the order for an
        all-to-all within nodes, followed by one between nodes."""
        x, groups, bits = given.x, given.groups, given.bits
        size = _size(x.numel(), groups, bits)
        order = (given.nodes, given.devices_per_node, given.pipeline_size)
        return _quantize(
            x, groups, bits, given.kind, _count_loaded(size, 16, 32, 512) > size, order
        )

    @takes("levels params in_groups out_groups bits kind parts")
    def quantized_reduction(self, given: Any) -> list[Tensor]:
        """The sum of ``parts`` parts, which follow each other in memory, quantized."""
        levels, bits, parts, groups = given.levels, given.bits, given.parts, given.out_groups
        _check_bits(bits)
        size = _size(levels.numel() * 8 // bits // parts, groups, bits)
        sums, params = call_checked(
            functions.deepspeed_reduce, levels.contiguous(),
            given.params.contiguous(), parts, given.in_groups, groups, bits,
            given.kind == self.Symmetric, _reduction_slots(size) > size,
        )  # fmt: skip
        return [sums.view(_scale_last_dim(levels, 1, parts)), params]


def _quantize(
    x: Tensor, groups: int, bits: int, kind: int, with_zero: bool, order: tuple[int, ...]
) -> list[Tensor]:
    function = functions.deepspeed_quantize
    symmetric = kind == QuantizationType.Symmetric
    return list(call_checked(function, x.contiguous(), groups, bits, symmetric, with_zero, *order))


def _scale_last_dim(tensor: Tensor, factor: int, divisor: int) -> list[int]:
    """The shape of a tensor with another last dimension."""
    *rest, last = tensor.shape
    return [*rest, last * factor // divisor]


# The number of elements that the threads of DeepSpeed's kernels load for a group. Elements beyond
# its end are zeros, and the group's range includes them.


def _reduction_slots(size: int) -> int:
    filled, a_turn = _count_loaded(size, 8, 1, 1024), 1024 * 8
    # From four turns on, the number of turns is even.
    return filled + a_turn if filled >= 4 * a_turn and filled // a_turn % 2 else filled


def _count_loaded(size: int, a_thread: int, fewest: int, most: int) -> int:
    """The elements that whole turns load, with a power of two of threads in each turn."""
    wanted = -(-size // a_thread)
    threads = max(fewest, min(most, 1 << (wanted - 1).bit_length())) if wanted else fewest
    turn = threads * a_thread
    return -(-size // turn) * turn


def _size(elements: int, groups: int, bits: int) -> int:
    """The size of a group. Raises UsageError if the elements cannot be split into the groups."""
    _check_bits(bits)
    if groups < 1 or elements % groups or (elements // groups) * bits % 8:
        raise UsageError(
            f"{elements} elements cannot form {groups} groups of whole bytes at {bits} bits"
        )
    return elements // groups


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise UsageError(f"num_bits is {bits}, expected 4 or 8")
