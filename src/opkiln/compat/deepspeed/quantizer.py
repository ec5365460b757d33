"""DeepSpeed's module ``quantizer``, over opkiln's op of that name.

The tensors are DeepSpeed's: levels in int8, of four bits two to a byte, the element of even index
in the high half; fp32 parameters of shape ``(groups, 1)``, a scale, or where asymmetric
``(groups, 2)``, a scale and the number that the level 0 stands for. An element is ``level * scale``
(``+ offset``), whoever quantized it, so that ranks with and without opkiln understand each other.

How a group is scaled is opkiln's: its greatest element is the greatest level, where DeepSpeed takes
the next power of two and cuts off what is above the top. Sums are fp32, where DeepSpeed's are fp16.
fp32 and bf16 are quantized as what they are, where DeepSpeed takes their bits for fp16. A group may
have any size up to 65536; DeepSpeed leaves the output of larger ones than 16384 as it is.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError
from opkiln.model import CPU
from opkiln.registry import get_builder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_LEAST, _STEP = 16, 8  # the sizes of groups that the op takes are multiples of 8 from 16


class QuantizationType(IntEnum):
    """Levels around 0, or around the middle of each group."""

    Symmetric = 0
    Asymmetric = 1


class _Groups(NamedTuple):
    """How a tensor is cut into groups, and how it is handed to the op."""

    number: int
    size: int
    bits: int

    @property
    def padded(self) -> int:
        """The size that the op is given: where it takes no groups of theirs, they are filled up."""
        return max(_LEAST, -(-self.size // _STEP) * _STEP)

    @property
    def filled(self) -> bool:
        """Whether they have to be; one group alone may be shorter than its size."""
        return self.padded != self.size and self.number > 1

    def bytes(self, elements: int) -> int:
        return elements * self.bits // 8


class Quantizer(OpModule):
    """``quantizer``: int8 and int4 by groups, for weights and for compressed all-reduce."""

    NAME = "quantizer"
    QuantizationType = QuantizationType
    Symmetric = QuantizationType.Symmetric
    Asymmetric = QuantizationType.Asymmetric

    def __init__(self, rest: Callable[[], Any] | None = None) -> None:
        super().__init__(rest)
        self._loaded: dict[str, Any] = {}
        self._of("cpu" if get_builder(self.NAME).backend == CPU else "cuda")

    def _of(self, device: str) -> Any:
        if device not in self._loaded:
            backend = "rocm" if device == "cuda" and torch.version.hip is not None else device
            self._loaded[device] = get_builder(self.NAME, backend=backend).load()
        return self._loaded[device]

    def quantize(
        self, input_vals: Tensor, groups: int, num_bits: int, quant_type: int
    ) -> list[Tensor]:
        """Levels, in the tensor's shape (the last dimension halved for four bits), and the
        parameters of the groups. Raises UsageError, naming what cannot be."""
        values, params = self._quantized(input_vals, groups, num_bits, quant_type, (1, 1, 1))
        shape = list(input_vals.shape)
        shape[-1] = shape[-1] * num_bits // 8
        return [values.view(shape), params]

    def dequantize(
        self, quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: int
    ) -> Tensor:
        """The numbers again, in fp16. Raises UsageError, naming what cannot be."""
        return self._back(quantized_data, params, groups, num_bits, quant_type, torch.float16)

    def dequantize_fp32(
        self, quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: int
    ) -> Tensor:
        """As ``dequantize``, in fp32."""
        return self._back(quantized_data, params, groups, num_bits, quant_type, torch.float32)

    def dequantize_int4_to_half_experimental(
        self, data_in: Tensor, scale_buffer: Tensor, min_val_buffer: Tensor, num_group: int,
        group_size: int,
    ) -> Tensor:  # fmt: skip
        """``level / scale + min`` of unsigned levels, two to a byte, in fp16, a group to a row."""
        return self._unsigned(data_in, scale_buffer, min_val_buffer, num_group, group_size, 4)

    def dequantize_int8_to_half_experimental(
        self, data_in: Tensor, scale_buffer: Tensor, min_val_buffer: Tensor, num_group: int,
        group_size: int,
    ) -> Tensor:  # fmt: skip
        """As for four bits, one to a byte."""
        return self._unsigned(data_in, scale_buffer, min_val_buffer, num_group, group_size, 8)

    def swizzle_quant(
        self, input_vals: Tensor, groups: int, num_bits: int, quant_type: int, pipeline_size: int,
        nodes: int, devices_per_node: int,
    ) -> list[Tensor]:  # fmt: skip
        """Levels, in one dimension, and parameters of the groups, in the order of an all-to-all
        within nodes that another between nodes follows."""
        order = (nodes, devices_per_node, pipeline_size)
        return list(self._quantized(input_vals, groups, num_bits, quant_type, order))

    def quantized_reduction(
        self, input_vals: Tensor, input_scales: Tensor, in_groups: int, out_groups: int,
        num_bits: int, quant_type: int, devices_per_node: int,
    ) -> list[Tensor]:  # fmt: skip
        """The sum of ``devices_per_node`` parts that lie one after the other, quantized."""
        symmetric = quant_type == QuantizationType.Symmetric
        _check_bits(num_bits)
        parts = input_vals.reshape(devices_per_node, -1)
        elements = parts.shape[1] * 8 // num_bits
        taken = _groups(elements, in_groups // devices_per_node, num_bits)
        given = _groups(elements, out_groups, num_bits)
        if taken.size != given.size and (taken.filled or given.filled):
            raise UsageError(
                f"groups of {taken.size} elements cannot be reduced to groups of {given.size}",
                why=f"groups of different sizes are multiples of {_STEP} from {_LEAST}",
            )
        # Halves of bytes are swapped on both sides: elementwise, that comes to nothing.
        rows = [_filled(part.reshape(taken.number, -1), taken) for part in parts]
        params = input_scales.reshape(devices_per_node, taken.number, -1)
        scales = [each[:, 0].contiguous() for each in params]
        offsets = [] if symmetric else [_lowest(each, num_bits) for each in params]
        count = taken.padded * taken.number if taken.filled else elements
        size = given.padded if not taken.filled else taken.padded
        values, scale, offset = _asked(
            self._of(input_vals.device.type).quantized_reduce,
            [_levels(row, num_bits, symmetric) for row in rows], scales, offsets, count, num_bits,
            taken.padded, symmetric, 1.0, num_bits, size, symmetric, False, 0, 0,
        )  # fmt: skip
        shape = list(input_vals.shape)
        shape[-1] //= devices_per_node
        out = _cut(_bytes(values, num_bits, symmetric), given).view(shape)
        return [out, _params(scale, offset, num_bits, symmetric)]

    def _quantized(
        self,
        x: Tensor,
        groups: int,
        bits: int,
        quant_type: int,
        order: tuple[int, int, int],
    ) -> tuple[Tensor, Tensor]:
        symmetric = quant_type == QuantizationType.Symmetric
        _check_bits(bits)
        cut = _groups(x.numel(), groups, bits)
        flat = x.detach().contiguous()
        if cut.filled:
            rows = flat.view(cut.number, cut.size)
            # The first element once more: it changes neither the greatest nor the least.
            more = rows[:, :1].expand(-1, cut.padded - cut.size)
            flat = torch.cat([rows, more], dim=1)
        values, scales, offsets = _asked(
            self._of(x.device.type).quantize, flat, bits, cut.padded, symmetric, False, 0, 0, *order
        )
        packed = _cut(_swapped(_bytes(values, bits, symmetric), bits), cut)
        return packed, _params(scales, offsets, bits, symmetric)

    def _back(
        self,
        values: Tensor,
        params: Tensor,
        groups: int,
        bits: int,
        quant_type: int,
        dtype: torch.dtype,
    ) -> Tensor:
        symmetric = quant_type == QuantizationType.Symmetric
        _check_bits(bits)
        shape = list(values.shape)
        shape[-1] = shape[-1] * 8 // bits
        cut = _groups(values.numel() * 8 // bits, groups, bits)
        rows = _filled(_swapped(values.contiguous().view(cut.number, -1), bits), cut)
        table = params.reshape(cut.number, -1)
        offsets = params.new_empty(0) if symmetric else _lowest(table, bits)
        count = cut.padded * cut.number if cut.filled else cut.size * cut.number
        flat = _asked(
            self._of(values.device.type).dequantize, _levels(rows, bits, symmetric),
            table[:, 0].contiguous(), offsets, count, dtype, bits, cut.padded, symmetric, 1, 1, 1,
        )  # fmt: skip
        if cut.filled:
            flat = flat.view(cut.number, cut.padded)[:, : cut.size]
        return flat.reshape(shape)  # type: ignore[no-any-return]

    def _unsigned(
        self, data: Tensor, scales: Tensor, least: Tensor, groups: int, size: int, bits: int
    ) -> Tensor:
        cut = _groups(groups * size, groups, bits)
        levels = data.contiguous().view(torch.uint8).view(cut.number, -1)
        rows = _filled(_swapped(levels, bits), cut)
        count = cut.padded * cut.number if cut.filled else cut.size * cut.number
        flat = _asked(
            self._of(data.device.type).dequantize, rows.reshape(-1).view(torch.uint8),
            scales.reshape(-1).float().reciprocal(), least.reshape(-1).float(), count,
            torch.float16, bits, cut.padded, False, 1, 1, 1,
        )  # fmt: skip
        if cut.filled:
            flat = flat.view(cut.number, cut.padded)[:, : cut.size]
        return flat.reshape(groups, size)  # type: ignore[no-any-return]


def _groups(elements: int, count: int, bits: int) -> _Groups:
    """Raises UsageError for elements that cannot be cut so."""
    if count < 1 or elements % count or (elements // count) * bits % 8:
        raise UsageError(
            f"{elements} elements cannot be cut into {count} groups of whole bytes at {bits} bits"
        )
    return _Groups(count, elements // count, bits)


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise UsageError(f"num_bits is {bits}, expected 4 or 8")


def _asked(function: Callable[..., Any], *args: Any) -> Any:
    """What the op refuses is the caller's to mend, and it says what."""
    try:
        with torch.no_grad():
            return function(*args)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        if ", expected " in said or " is not on " in said:
            raise UsageError(said) from error
        raise


def _filled(rows: Tensor, cut: _Groups) -> Tensor:
    """Packed levels of groups, the first byte of each once more up to the size that the op is
    given: what is summed over parts there is what is summed elsewhere in the group."""
    if not cut.filled:
        return rows
    missing = cut.bytes(cut.padded) - rows.shape[1]
    return torch.cat([rows, rows[:, :1].expand(-1, missing)], dim=1)


def _cut(packed: Tensor, cut: _Groups) -> Tensor:
    """Packed levels without those that were filled in, in one dimension."""
    if not cut.filled:
        return packed
    return packed.view(cut.number, -1)[:, : cut.bytes(cut.size)].reshape(-1)


def _swapped(packed: Tensor, bits: int) -> Tensor:
    """The halves of each byte in the other order, where levels are halves."""
    if bits == 8:
        return packed
    unsigned = packed.view(torch.uint8)
    return (unsigned >> 4).add_(unsigned, alpha=16).view(packed.dtype)  # which wraps around


def _flip(bits: int) -> int:
    """What turns signed levels into unsigned ones, and back."""
    return 0x80 if bits == 8 else 0x88


def _levels(rows: Tensor, bits: int, symmetric: bool) -> Tensor:
    """DeepSpeed's levels as the op takes them."""
    flat = rows.reshape(-1)
    if symmetric:
        return flat.view(torch.int8 if bits == 8 else torch.uint8)
    return flat.view(torch.uint8) ^ _flip(bits)


def _bytes(values: Tensor, bits: int, symmetric: bool) -> Tensor:
    """The op's levels as DeepSpeed has them, in int8."""
    unsigned = values.view(torch.uint8)
    return (unsigned if symmetric else unsigned ^ _flip(bits)).view(torch.int8)


def _params(scales: Tensor, offsets: Tensor, bits: int, symmetric: bool) -> Tensor:
    if symmetric:
        return scales.view(-1, 1)
    middle = offsets + scales * 2 ** (bits - 1)  # what the signed level 0 stands for
    return torch.stack([scales, middle], dim=1)


def _lowest(params: Tensor, bits: int) -> Tensor:
    """The op's offsets, which are what the lowest level stands for."""
    lowest: Tensor = params[:, 1] - params[:, 0] * 2 ** (bits - 1)
    return lowest
