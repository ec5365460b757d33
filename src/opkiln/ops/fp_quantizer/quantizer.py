"""The front end of ``fp_quantizer``: ``opkiln.quant.FPQuantizer``."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

import opkiln
from opkiln.errors import ArgumentError
from opkiln.ops.checks import call_checked, check_dense
from opkiln.ops.fp_quantizer import functions
from opkiln.ops.fp_quantizer.functions import FORMATS, FORMATS_IN_WORDS, check_group_size
from opkiln.ops.quantizer.quantize import each_tensor, move_record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class FPQuantized(NamedTuple):
    """A tensor as narrow floating-point numbers, with a scale for each group.

    ``codes`` are bytes, without gaps: two e2m1 in a byte, four e3m2 or two e4m7 in three bytes, the
    first in the lowest bits. Those of e4m3 and e5m2 are torch's own:
    ``codes.view(torch.float8_e4m3fn)``. An element is the number of its code times its group's
    scale.
    """

    codes: Tensor  # uint8
    scales: Tensor  # one for each group
    shape: tuple[int, ...]  # of the tensor
    dtype: torch.dtype  # that dequantize gives
    format: str  # e4m3, e5m2, e3m2, e4m7 or e2m1
    group_size: int  # elements of a group

    @property
    def numel(self) -> int:
        """The elements of the tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of codes and scales: what is kept, or travels."""
        return int(self.codes.nbytes + self.scales.nbytes)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.codes.device

    def to(self, *args: Any, **kwargs: Any) -> FPQuantized:
        """As ``Tensor.to``, ``non_blocking`` included; a dtype is that which dequantize gives."""
        return move_record(self, *args, **kwargs)

    def cpu(self) -> FPQuantized:
        """As ``Tensor.cpu``."""
        return move_record(self, "cpu")

    def cuda(
        self, device: torch.device | int | str | None = None, non_blocking: bool = False
    ) -> FPQuantized:
        """As ``Tensor.cuda``."""
        return each_tensor(self, lambda tensor: tensor.cuda(device, non_blocking=non_blocking))

    def pin_memory(self) -> FPQuantized:
        """In page-locked memory, from which ``to("cuda", non_blocking=True)`` does not wait."""
        return each_tensor(self, lambda tensor: tensor.pin_memory())

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Tensors and plain values, and a function that ``torch.load`` is allowed to call."""
        return opkiln._rebuild_fp_quantized, tuple(self)


class FPQuantizer:
    """Quantizes tensors to fp8 (``e4m3``, ``e5m2``), fp6 (``e3m2``), fp12 (``e4m7``) or fp4
    (``e2m1``), in groups of neighbours with a scale for each.

        quantizer = FPQuantizer("e3m2", group_size=512)
        packed = quantizer.quantize(weight)
        weight = quantizer.dequantize(packed)
        experts = quantizer.selective_dequantize(packed, [3, 5])

    Groups are those of ``x.reshape(-1)``, a multiple of 16 elements from 16 to 65536; the last
    may be shorter. Raises UsageError for a format or a size that cannot be.
    """

    def __init__(self, form: str = "e4m3", /, *, group_size: int = 512) -> None:
        if form not in FORMATS:
            raise ArgumentError(
                f"the format is {form!r}, expected one of {', '.join(FORMATS)}",
                why=FORMATS_IN_WORDS,
            )
        call_checked(check_group_size, group_size)
        self.format, self.group_size = FORMATS[form], group_size

    @classmethod
    def of_bits(
        cls, bits: int, mantissa_bits: int | None = None, *, group_size: int = 512
    ) -> FPQuantizer:
        """The quantizer of a format that is given by its bits, and those of its mantissa where
        there are two of so many. Raises UsageError."""
        for each in FORMATS.values():
            if each.bits == bits and mantissa_bits in (None, each.mantissa_bits):
                return cls(each.name, group_size=group_size)
        raise ArgumentError(
            f"there is no format of {bits} bits"
            + ("" if mantissa_bits is None else f" with {mantissa_bits} of mantissa"),
            why=FORMATS_IN_WORDS,
        )

    def __repr__(self) -> str:
        return f"FPQuantizer({self.format.name!r}, group_size={self.group_size})"

    def quantize(
        self, x: Tensor, *, stochastic: bool = False, seed: int = 0, offset: int | Tensor = 0
    ) -> FPQuantized:
        """``x``, of fp32, bf16 or fp16, in this format.

        Rounds to nearest, ties to even; or with ``stochastic`` up or down at random, so that the
        expected value is the element. The random bits depend on nothing but ``seed``, ``offset``
        and the element's index: give each step an ``offset`` of its own. (As a tensor of one int64
        on the same device it is read when the kernel runs, so also in a captured graph.)
        A group that holds NaN or infinity comes back as NaN, all of it.
        Raises UsageError, naming the argument.
        """
        check_dense(x)
        later = offset if isinstance(offset, Tensor) else None
        codes, scales = call_checked(
            functions.fp_quantize, x.detach(), self.group_size, self.format.bits,
            self.format.mantissa_bits, stochastic, seed, 0 if later is not None else offset, later,
        )  # fmt: skip
        return FPQuantized(
            codes, scales, tuple(x.shape), x.dtype, self.format.name, self.group_size
        )

    def dequantize(self, packed: FPQuantized, *, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor again, in its shape; of its dtype or another.

        Raises UsageError where it was quantized otherwise.
        """
        return self._dequantized("fp_dequantize", packed, (), dtype)

    def selective_dequantize(
        self,
        packed: FPQuantized,
        rows: Tensor | Sequence[int],
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """These rows (indices of the first dimension) alone, in their order; one may be asked for
        twice.

        Raises UsageError where it was quantized otherwise or a row is not there. On a GPU rows in a
        tensor are not looked at, which would take waiting: one that is not there comes out as NaN.
        """
        if not isinstance(rows, Tensor):
            listed = list(rows)
            for i, row in enumerate(listed):
                if packed.shape and not 0 <= row < packed.shape[0]:
                    raise ArgumentError(f"rows[{i}] is {row}, expected 0 to {packed.shape[0] - 1}")
            rows = torch.tensor(listed, dtype=torch.int64, device=packed.codes.device)
        elif rows.dtype == torch.int32:
            rows = rows.long()
        return self._dequantized("fp_dequantize_rows", packed, (rows,), dtype)

    def _dequantized(
        self, name: str, packed: FPQuantized, rows: tuple[Tensor, ...], dtype: torch.dtype | None
    ) -> Tensor:
        if (packed.format, packed.group_size) != (self.format.name, self.group_size):
            raise ArgumentError(
                f"packed is {packed.format} in groups of {packed.group_size}, this quantizer's is "
                f"{self.format.name} in groups of {self.group_size}",
                hint=f'FPQuantizer("{packed.format}", group_size={packed.group_size})',
            )
        wanted = packed.dtype if dtype is None else dtype
        out: Tensor = call_checked(
            getattr(functions, name), packed.codes, packed.scales.detach(), *rows,
            packed.shape, self.group_size, self.format.bits, self.format.mantissa_bits, wanted,
        )  # fmt: skip
        return out
