"""DeepSpeed on opkiln: its builders load opkiln's ops, or its own sources built by opkiln.

    import opkiln.compat.deepspeed
    opkiln.compat.deepspeed.install()    # or: import opkiln.compat.deepspeed.auto

``opkiln run COMMAND`` does the same for a program as it is. ``OPKILN_DEEPSPEED`` says what serves
which op. ``OpBuilder``, ``CUDAOpBuilder`` and ``TorchCPUOpBuilder`` here are for builders that were
written against DeepSpeed's: only their import changes. Importing this package does no work.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.compat.deepspeed.builders import CUDAOpBuilder as CUDAOpBuilder
    from opkiln.compat.deepspeed.builders import OpBuilder as OpBuilder
    from opkiln.compat.deepspeed.builders import TorchCPUOpBuilder as TorchCPUOpBuilder
    from opkiln.compat.deepspeed.patch import install as install
    from opkiln.compat.deepspeed.patch import remove as remove
    from opkiln.compat.deepspeed.serve import Served as Served
    from opkiln.compat.deepspeed.serve import served as served

_NAMES = {
    "OpBuilder": "builders",
    "CUDAOpBuilder": "builders",
    "TorchCPUOpBuilder": "builders",
    "install": "patch",
    "remove": "patch",
    "Served": "serve",
    "served": "serve",
}

__all__ = [
    "CUDAOpBuilder", "OpBuilder", "Served", "TorchCPUOpBuilder", "install", "remove", "served",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _NAMES:
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
