"""Quantizers of the catalogue. Importing this module is cheap: each name is imported when used."""

from __future__ import annotations

import opkiln
from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.fp_quantizer.quantizer import FPQuantized, FPQuantizer
    from opkiln.ops.packbits.signs import packbits, unpackbits
    from opkiln.ops.quantizer.quantize import (
        Quantized,
        Swizzle,
        dequantize,
        fake_quantize,
        quantize,
        quantized_reduce,
        swizzle_quantize,
    )

__all__ = [
    "FPQuantized",
    "FPQuantizer",
    "Quantized",
    "Swizzle",
    "dequantize",
    "fake_quantize",
    "packbits",
    "quantize",
    "quantized_reduce",
    "swizzle_quantize",
    "unpackbits",
]

_HOMES = {
    **dict.fromkeys(__all__, "opkiln.ops.quantizer.quantize"),
    **dict.fromkeys(("FPQuantized", "FPQuantizer"), "opkiln.ops.fp_quantizer.quantizer"),
    **dict.fromkeys(("packbits", "unpackbits"), "opkiln.ops.packbits.signs"),
}

opkiln._allow_torch_to_load()  # torch may have been imported after opkiln

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
