"""opkiln: native PyTorch operators from a package that installs as pure Python.

The first use of an op compiles exactly what this machine needs; later processes load it in a few
milliseconds; where an op cannot be had, its pure-PyTorch version runs and the user is told why.

    import opkiln
    adam = opkiln.optim.CPUAdam(model.parameters(), lr=1e-3)
    ext = opkiln.load("my_ext", ["my_ext.cpp"])

Importing this package does no work: the names below are imported on first use. If torch is already
imported, it is told that ``torch.load`` may create opkiln's quantized tensors.

Every module of opkiln imports this one, so this one imports none of them, not even for types. What
type checkers and editors see of the names is in ``__init__.pyi``.
"""

import sys

__version__ = "0.1.0"

_LAZY = {
    "op": "opkiln.builder.library",
    "library": "opkiln.builder.library",
    "load": "opkiln.extension",
    "load_inline": "opkiln.extension",
    "cubin": "opkiln.building.cubin",
    "OpBuilder": "opkiln.builder",
    "CUDAOpBuilder": "opkiln.builder",
    "SYCLOpBuilder": "opkiln.builder",
    "ALL_OPS": "opkiln.builder.registry",
    "get_builder": "opkiln.builder.registry",
    "explain": "opkiln.builder.registry",
    "seal": "opkiln.decision.terms",
    "ensure": "opkiln.cluster.ensure",
    "get_accelerator": "opkiln.accelerator.detect",
    "set_accelerator": "opkiln.accelerator.detect",
}
_MODULES = ("optim", "quant", "nn", "io", "comm", "utils", "errors", "settings")

__all__ = ["__version__", *_LAZY, *_MODULES]  # noqa: PLE0604 (names that are resolved lazily)


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
    A torch that is imported later calls this itself, if it loads its backends: see
    ``compat/hook.py``. ``opkiln.quant`` and the modules with the classes call it, too.
    """
    add = getattr(sys.modules.get("torch.serialization"), "add_safe_globals", None)
    if add is not None:
        add([_rebuild_quantized, _rebuild_fp_quantized])


_allow_torch_to_load()
