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

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError
from opkiln.ops.deepspeed_quantizer.op import DeepSpeedQuantizerBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_functions = DeepSpeedQuantizerBuilder.functions


class QuantizationType(IntEnum):
    """Levels around 0, or around the middle of each group."""

    Symmetric = 0
    Asymmetric = 1


class Quantizer(OpModule):
    """``quantizer``: int8 and int4 by groups, for weights and for compressed all-reduce."""

    NAME = "quantizer"
    QuantizationType = QuantizationType
    Symmetric = QuantizationType.Symmetric
    Asymmetric = QuantizationType.Asymmetric

    def _load(self) -> None:
        _functions()

    def quantize(
        self, input_vals: Tensor, groups: int, num_bits: int, quant_type: int
    ) -> list[Tensor]:
        """Levels, in the tensor's shape (the last dimension halved for four bits), and the
        parameters of the groups. Raises UsageError, naming the argument."""
        size = _size(input_vals.numel(), groups, num_bits)
        levels, params = self._quantized(
            input_vals, groups, num_bits, quant_type, _slots(size) > size, (1, 1, 1)
        )
        shape = list(input_vals.shape)
        shape[-1] = shape[-1] * num_bits // 8
        return [levels.view(shape), params]

    def dequantize(
        self, quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: int,
        *, dtype: torch.dtype = torch.float16,
    ) -> Tensor:  # fmt: skip
        """The dequantized numbers, in fp16. Raises UsageError, naming the argument."""
        _check_bits(num_bits)
        _size(quantized_data.numel() * 8 // num_bits, groups, num_bits)
        flat: Tensor = _asked(
            _functions(quantized_data.device.type).deepspeed_dequantize,
            quantized_data.contiguous(), params.contiguous(), groups, num_bits,
            _is_symmetric(quant_type), dtype,
        )  # fmt: skip
        shape = list(quantized_data.shape)
        shape[-1] = shape[-1] * 8 // num_bits
        return flat.view(shape)

    dequantize_fp32 = partialmethod(dequantize, dtype=torch.float32)

    def dequantize_int4_to_half_experimental(
        self, data_in: Tensor, scale_buffer: Tensor, min_val_buffer: Tensor, num_group: int,
        group_size: int,
    ) -> Tensor:  # fmt: skip
        """``level / scale + min`` in fp16, one row per group. Levels are unsigned, two per byte."""
        levels = data_in.reshape(-1).view(torch.uint8)
        halves = torch.stack([levels >> 4, levels & 15], dim=1)
        return _unsigned(halves, scale_buffer, min_val_buffer, num_group, group_size)

    def dequantize_int8_to_half_experimental(
        self, data_in: Tensor, scale_buffer: Tensor, min_val_buffer: Tensor, num_group: int,
        group_size: int,
    ) -> Tensor:  # fmt: skip
        """Like the function for four bits, with one level per byte."""
        levels = data_in.reshape(-1).view(torch.uint8)
        return _unsigned(levels, scale_buffer, min_val_buffer, num_group, group_size)

    def swizzle_quant(
        self, input_vals: Tensor, groups: int, num_bits: int, quant_type: int, pipeline_size: int,
        nodes: int, devices_per_node: int,
    ) -> list[Tensor]:  # fmt: skip
        """Levels, in one dimension, and parameters of the groups. They are in the order for an
        all-to-all within nodes, followed by one between nodes."""
        size = _size(input_vals.numel(), groups, num_bits)
        order = (nodes, devices_per_node, pipeline_size)
        with_zero = _swizzle_slots(size) > size
        return self._quantized(input_vals, groups, num_bits, quant_type, with_zero, order)

    def quantized_reduction(
        self, input_vals: Tensor, input_scales: Tensor, in_groups: int, out_groups: int,
        num_bits: int, quant_type: int, devices_per_node: int,
    ) -> list[Tensor]:  # fmt: skip
        """The sum of ``devices_per_node`` parts, which follow each other in memory, quantized."""
        _check_bits(num_bits)
        elements = input_vals.numel() * 8 // num_bits // devices_per_node
        size = _size(elements, out_groups, num_bits)
        levels, params = _asked(
            _functions(input_vals.device.type).deepspeed_reduce, input_vals.contiguous(),
            input_scales.contiguous(), devices_per_node, in_groups, out_groups, num_bits,
            _is_symmetric(quant_type), _reduction_slots(size) > size,
        )  # fmt: skip
        shape = list(input_vals.shape)
        shape[-1] //= devices_per_node
        return [levels.view(shape), params]

    def _quantized(
        self, x: Tensor, groups: int, bits: int, quant_type: int, with_zero: bool,
        order: tuple[int, int, int],
    ) -> list[Tensor]:  # fmt: skip
        function = _functions(x.device.type).deepspeed_quantize
        flat = x.detach().contiguous()
        symmetric = _is_symmetric(quant_type)
        return list(_asked(function, flat, groups, bits, symmetric, with_zero, *order))


# How many elements the threads of DeepSpeed's kernels load for a group. Those beyond its end are
# zeros, and the group's range includes them.


def _slots(size: int) -> int:
    a_thread = 8 if size <= 128 else 16
    return _filled(size, a_thread, 1, 256)


def _swizzle_slots(size: int) -> int:
    return _filled(size, 16, 32, 512)


def _reduction_slots(size: int) -> int:
    filled, a_turn = _filled(size, 8, 1, 1024), 1024 * 8
    # From four turns on, the number of turns is even.
    return filled + a_turn if filled >= 4 * a_turn and filled // a_turn % 2 else filled


def _filled(size: int, a_thread: int, fewest: int, most: int) -> int:
    """The elements that whole turns load, with a power of two of threads in each turn."""
    wanted = -(-size // a_thread)
    threads = max(fewest, min(most, 1 << (wanted - 1).bit_length())) if wanted else fewest
    turn = threads * a_thread
    return -(-size // turn) * turn


def _unsigned(levels: Tensor, scales: Tensor, least: Tensor, groups: int, size: int) -> Tensor:
    """Computed in fp16: each operation rounds, as in DeepSpeed."""
    if levels.numel() != groups * size:
        raise UsageError(
            f"data_in has {levels.numel()} elements, expected num_group * group_size = "
            f"{groups * size}"
        )
    rows = levels.reshape(groups, size).half()
    return rows.div_(scales.reshape(-1, 1).half()).add_(least.reshape(-1, 1).half())


def _is_symmetric(quant_type: int) -> bool:
    return quant_type == QuantizationType.Symmetric


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


def _asked(function: Callable[..., Any], *args: Any) -> Any:
    """Call the op. If it refuses an argument, raise its message as a UsageError."""
    try:
        with torch.no_grad():
            return function(*args)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if ", expected " in said or " is not on " in said:
            raise UsageError(said) from error
        raise
