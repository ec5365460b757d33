"""The number formats, by name. Imports no torch.

A number is its sign, its exponent and its mantissa, from the highest bit to the lowest, with the
subnormals of IEEE 754. ``e4m3`` and ``e5m2`` are the bytes of ``torch.float8_e4m3fn`` and
``torch.float8_e5m2``, with their NaN and infinity; ``e3m2`` and ``e2m1`` are those of the Open
Compute Project's MX formats. They and ``e4m7`` have neither NaN nor infinity.
"""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """A number format; ``largest`` is the largest number that it holds."""

    name: str
    bits: int
    mantissa_bits: int
    largest: float

    @property
    def bias(self) -> int:
        """What is added to the exponent before it is stored."""
        return (1 << (self.bits - 2 - self.mantissa_bits)) - 1

    @property
    def per_pack(self) -> int:
        """How many values fill a whole number of bytes, at the least."""
        return {4: 2, 6: 4, 8: 1, 12: 2}[self.bits]


FORMATS = {
    each.name: each
    for each in (
        Format("e4m3", 8, 3, 448.0),
        Format("e5m2", 8, 2, 57344.0),
        Format("e3m2", 6, 2, 28.0),
        Format("e4m7", 12, 7, 510.0),
        Format("e2m1", 4, 1, 6.0),
    )
}
_BY_BITS = {(each.bits, each.mantissa_bits): each for each in FORMATS.values()}

LEAST_GROUP, LARGEST_GROUP = 16, 65536
LEAST_SCALE = 2.0**-126  # fp32's least normal number: its inverse is finite


def list_formats() -> str:
    """All formats in words, for messages."""
    return ", ".join(
        f"{each.name} ({each.bits} bits, {each.mantissa_bits} of mantissa)"
        for each in FORMATS.values()
    )


def find(bits: int, mantissa_bits: int) -> Format | None:
    """The format of so many bits, if there is one."""
    return _BY_BITS.get((bits, mantissa_bits))


def group_size_fits(group_size: int) -> bool:
    """Whether groups may have this many elements: then each starts at a whole byte."""
    return LEAST_GROUP <= group_size <= LARGEST_GROUP and group_size % LEAST_GROUP == 0


def byte_count(numel: int, bits: int) -> int:
    """How many bytes so many values take."""
    return (numel * bits + 7) // 8


def group_count(numel: int, group_size: int) -> int:
    """How many groups so many values make; the last one may be shorter."""
    return (numel + group_size - 1) // group_size
