"""Quantizers of the catalogue. Importing this module is cheap: each name is imported when used."""

from __future__ import annotations

import opkiln
from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.ops.fp_quantizer.quantizer import FPQuantized as FPQuantized
    from opkiln.ops.fp_quantizer.quantizer import FPQuantizer as FPQuantizer
    from opkiln.ops.packbits.signs import packbits as packbits
    from opkiln.ops.packbits.signs import unpackbits as unpackbits
    from opkiln.ops.quantizer.quantize import Quantized as Quantized
    from opkiln.ops.quantizer.quantize import Swizzle as Swizzle
    from opkiln.ops.quantizer.quantize import dequantize as dequantize
    from opkiln.ops.quantizer.quantize import fake_quantize as fake_quantize
    from opkiln.ops.quantizer.quantize import quantize as quantize
    from opkiln.ops.quantizer.quantize import quantized_reduce as quantized_reduce
    from opkiln.ops.quantizer.quantize import swizzle_quantize as swizzle_quantize

opkiln._allow_torch_to_load()  # torch may have been imported after opkiln

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.ops.fp_quantizer.quantizer": "FPQuantized FPQuantizer",
    "opkiln.ops.packbits.signs": "packbits unpackbits",
    "opkiln.ops.quantizer.quantize":
        "Quantized Swizzle dequantize fake_quantize quantize quantized_reduce swizzle_quantize",
})  # fmt: skip
