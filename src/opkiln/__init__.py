"""opkiln: native PyTorch operators from a package that installs as pure Python.

The first use of an op compiles exactly what this machine needs; later processes load it in a few
milliseconds; where an op cannot be had, its pure-PyTorch version runs and the user is told why.

    import opkiln
    adam = opkiln.optim.CPUAdam(model.parameters(), lr=1e-3)
    ext = opkiln.load("my_ext", ["my_ext.cpp"])

Importing this package does no work: the names below are resolved when they are used. It only tells
a torch that is imported that ``torch.load`` may make opkiln's quantized tensors.
"""

import sys

__version__ = "0.1.0"

_LAZY = {
    "load": "opkiln.extension",
    "load_inline": "opkiln.extension",
    "OpBuilder": "opkiln.builder",
    "CUDAOpBuilder": "opkiln.builder",
    "SYCLOpBuilder": "opkiln.builder",
    "ALL_OPS": "opkiln.registry",
    "get_builder": "opkiln.registry",
    "explain": "opkiln.registry",
    "seal": "opkiln.loading.seal",
    "get_accelerator": "opkiln.accelerator.detect",
    "set_accelerator": "opkiln.accelerator.detect",
}
_MODULES = ("optim", "quant", "io", "utils", "errors", "settings")

__all__ = ["__version__", *_LAZY, *_MODULES]  # noqa: PLE0604 (names that are resolved lazily)

TYPE_CHECKING = False
if TYPE_CHECKING:  # what type checkers and editors see of the lazy names
    from opkiln import errors as errors
    from opkiln import io as io
    from opkiln import optim as optim
    from opkiln import quant as quant
    from opkiln import settings as settings
    from opkiln import utils as utils
    from opkiln.accelerator.detect import get_accelerator as get_accelerator
    from opkiln.accelerator.detect import set_accelerator as set_accelerator
    from opkiln.builder import CUDAOpBuilder as CUDAOpBuilder
    from opkiln.builder import OpBuilder as OpBuilder
    from opkiln.builder import SYCLOpBuilder as SYCLOpBuilder
    from opkiln.extension import load as load
    from opkiln.extension import load_inline as load_inline
    from opkiln.loading.seal import seal as seal
    from opkiln.registry import ALL_OPS as ALL_OPS
    from opkiln.registry import explain as explain
    from opkiln.registry import get_builder as get_builder


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    elif name in _MODULES:
        value = import_module(f"opkiln.{name}")
    else:
        raise AttributeError(f"module 'opkiln' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _rebuild_quantized(*fields: object) -> object:
    """A ``quant.Quantized`` of what was saved of it."""
    from importlib import import_module

    return import_module("opkiln.ops.quantizer.quantize").Quantized.of_saved(*fields)


def _rebuild_fp_quantized(*fields: object) -> object:
    """A ``quant.FPQuantized`` of what was saved of it."""
    from importlib import import_module

    return import_module("opkiln.ops.fp_quantizer.quantizer").FPQuantized(*fields)


def _allow_torch_to_load() -> None:
    """Tell torch, if it is imported, that ``torch.load`` may call the two functions above.

    By default it calls nothing that it was not told of. They only put tensors and numbers together.
    A torch that is imported later calls this itself: see ``compat/hook.py``.
    """
    add = getattr(sys.modules.get("torch.serialization"), "add_safe_globals", None)
    if add is not None:
        add([_rebuild_quantized, _rebuild_fp_quantized])


_allow_torch_to_load()
