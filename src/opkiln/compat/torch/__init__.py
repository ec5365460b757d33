"""``torch.utils.cpp_extension``, built by opkiln: ``import opkiln.compat.torch as cpp_extension``.

The functions that build and the functions that find toolkits are opkiln's, with torch's signatures.
Every other name (``COMMON_NVCC_FLAGS``, ``get_default_build_root``, …) is torch's own, taken from
its module on first use. Importing this does no work.

While ``compat.hook`` is installed, torch's own module has the same functions.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opkiln.compat.torch.build_ext import BuildExtension as BuildExtension
    from opkiln.compat.torch.extension import CppExtension as CppExtension
    from opkiln.compat.torch.extension import CUDAExtension as CUDAExtension
    from opkiln.compat.torch.extension import SyclExtension as SyclExtension
    from opkiln.compat.torch.jit import load as load
    from opkiln.compat.torch.jit import load_inline as load_inline
    from opkiln.compat.torch.paths import include_paths as include_paths
    from opkiln.compat.torch.paths import library_paths as library_paths

    # torch's own, or looked up on every use.
    CUDA_HOME: str | None  # the root of the CUDA toolkit that a build here would use
    check_compiler_is_gcc: Callable[[str], bool]
    check_compiler_ok_for_platform: Callable[[str], bool]
    get_compiler_abi_compatibility_and_version: Callable[[str], tuple[bool, Any]]
    get_cxx_compiler: Callable[[], str]
    get_default_build_root: Callable[[], str]
    remove_extension_h_precompiler_headers: Callable[[], None]

_TORCHS = "torch.utils.cpp_extension"
_HOMES = {
    **dict.fromkeys(("load", "load_inline"), "jit"),
    **dict.fromkeys(("include_paths", "library_paths"), "paths"),
    **dict.fromkeys(("CppExtension", "CUDAExtension", "SyclExtension"), "extension"),
    "BuildExtension": "build_ext",
}
_SUBMODULES = frozenset((*_HOMES.values(), "flags"))
SERVED = frozenset((*_HOMES, "is_ninja_available", "verify_ninja_availability"))

__all__ = [  # noqa: PLE0604 (names that are resolved lazily)
    *sorted(SERVED), "CUDA_HOME", "check_compiler_is_gcc", "check_compiler_ok_for_platform",
    "get_compiler_abi_compatibility_and_version", "get_cxx_compiler", "get_default_build_root",
    "remove_extension_h_precompiler_headers",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name == "CUDA_HOME":
        from opkiln.compat.torch import paths

        return paths.cuda_home_or(None)
    # `from opkiln.compat.torch import paths` asks for the name before it imports the submodule.
    if not name.startswith("__") and name not in _SUBMODULES:
        theirs = import_module(_TORCHS)
        if hasattr(theirs, name):
            return getattr(theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def is_ninja_available() -> bool:
    """True: builds are parallel and incremental without ninja."""
    return True


def verify_ninja_availability() -> None:
    """Do nothing: no build here needs ninja."""


def replacements(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """The owner, the attribute and the value of each function that is replaced in torch's module.

    ``BuildExtension`` needs setuptools, which torch's module has imported.
    """
    for name in sorted(SERVED):
        yield module, name, globals()[name] if name in globals() else __getattr__(name)


class Module(ModuleType):
    """torch's module while the hook is installed: its CUDA_HOME is the toolkit that opkiln uses.

    If no toolkit can be used, CUDA_HOME is the one that torch found, so that a script that looks
    for CUDA reaches the error that says why.
    """

    @property
    def CUDA_HOME(self) -> str | None:  # noqa: N802 (torch's name)
        from opkiln.compat.torch import paths

        return paths.cuda_home_or(vars(self).get("CUDA_HOME"))

    @CUDA_HOME.setter
    def CUDA_HOME(self, home: str | None) -> None:  # noqa: N802
        vars(self)["CUDA_HOME"] = home

    @CUDA_HOME.deleter
    def CUDA_HOME(self) -> None:  # noqa: N802
        del vars(self)["CUDA_HOME"]
