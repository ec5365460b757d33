"""``torch.utils.cpp_extension``, built by opkiln: ``import opkiln.compat.torch as cpp_extension``.

What builds, and what says where a toolkit is, is here, with torch's signatures. Every other name
(``COMMON_NVCC_FLAGS``, ``get_default_build_root``, …) is torch's own, taken from its module when it
is asked for. Importing this does no work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from opkiln.compat.torch_errors import ToolkitMissing
from opkiln.compat.torch_jit import load, load_inline
from opkiln.compat.torch_paths import cuda_home, include_paths, library_paths

if TYPE_CHECKING:
    from collections.abc import Callable

    from setuptools import Extension

    from opkiln.ship.setuptools import BuildExtension

    # torch's own, or asked for when they are used.
    CUDA_HOME: str | None
    check_compiler_is_gcc: Callable[[str], bool]
    check_compiler_ok_for_platform: Callable[[str], bool]
    get_compiler_abi_compatibility_and_version: Callable[[str], tuple[bool, Any]]
    get_cxx_compiler: Callable[[], str]
    get_default_build_root: Callable[[], str]
    remove_extension_h_precompiler_headers: Callable[[], None]

__all__ = [
    "CUDA_HOME",
    "BuildExtension",
    "CUDAExtension",
    "CppExtension",
    "SyclExtension",
    "check_compiler_is_gcc",
    "check_compiler_ok_for_platform",
    "get_compiler_abi_compatibility_and_version",
    "get_cxx_compiler",
    "get_default_build_root",
    "include_paths",
    "is_ninja_available",
    "library_paths",
    "load",
    "load_inline",
    "remove_extension_h_precompiler_headers",
    "verify_ninja_availability",
]

_TORCHS = "torch.utils.cpp_extension"


def __getattr__(name: str) -> Any:
    if name == "BuildExtension":
        # It is made of setuptools, which is slow to import.
        globals()[name] = import_module("opkiln.ship.setuptools").BuildExtension
        return globals()[name]
    if name == "CUDA_HOME":
        # Not kept: a script may set the variable and look again.
        try:
            return cuda_home()
        except ToolkitMissing:
            return None
    if not name.startswith("__"):
        theirs = import_module(_TORCHS)
        if hasattr(theirs, name):
            return getattr(theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def CppExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Extension:  # noqa: N802
    """A setuptools extension of C++ with torch's headers and libraries.

    The other arguments are setuptools'. With ``py_limited_api=True`` it is not linked to
    ``libtorch_python``, which is of one Python.
    """
    return _extension(name, sources, args, kwargs, "cpu", ())


def CUDAExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Extension:  # noqa: N802
    """As ``CppExtension``, with a CUDA toolkit's headers and runtime; on a ROCm torch, ROCm's.

    ``-rdc=true`` among nvcc's flags gets a device link, with ``dlink_libraries``; ``dlink`` alone
    asks for none. Raises ToolkitMissing, an OSError, where there is no toolkit.
    """
    from opkiln.toolchain import torch_sdk

    torch = torch_sdk.find()
    rocm = ("amdhip64", "c10_hip", "torch_hip")
    device_libraries = list(kwargs.pop("dlink_libraries", ()))
    linked = kwargs.pop("dlink", False) or device_libraries
    libraries = (
        rocm
        if torch is not None and torch.hip is not None
        else ("cudart", "c10_cuda", "torch_cuda")
    )
    extension = _extension(name, sources, args, kwargs, "cuda", libraries)
    if linked:
        flags = extension.extra_compile_args
        flags = dict(flags) if isinstance(flags, dict) else {"cxx": flags, "nvcc": list(flags)}
        flags["nvcc_dlink"] = [
            *flags.get("nvcc_dlink", ()),
            "-dlink",
            *(f"-L{path}" for path in extension.library_dirs),
            *(f"-l{library}" for library in device_libraries),
            *(["-dlto"] if torch is not None and torch.cuda is not None else []),
        ]
        extension.extra_compile_args = flags
    return extension


def SyclExtension(name: str, sources: list[str], *args: Any, **kwargs: Any) -> Extension:  # noqa: N802
    """As ``CppExtension``, with a SYCL compiler's headers and runtime.

    Raises ToolkitMissing, an OSError, where there is no SYCL compiler.
    """
    return _extension(name, sources, args, kwargs, "xpu", ("c10_xpu", "sycl", "torch_xpu"))


def _extension(
    name: str,
    sources: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    libraries: tuple[str, ...],
) -> Extension:
    from setuptools import Extension

    limited = kwargs.get("py_limited_api", False)
    # torch's headers for SYCL are asked for, its libraries are not: those are on the linker's path.
    searched = library_paths("cpu" if device == "xpu" else device)
    host = ("c10", "torch", "torch_cpu", *(() if limited else ("torch_python",)))
    given = {
        **kwargs,
        "include_dirs": [*kwargs.get("include_dirs", ()), *include_paths(device)],
        "library_dirs": [*kwargs.get("library_dirs", ()), *searched],
        "libraries": [*kwargs.get("libraries", ()), *host, *libraries],
        "language": "c++",
    }
    return Extension(name, sources, *args, **given)


def is_ninja_available() -> bool:
    """True: what ninja is asked for, parallel and incremental builds, is always there."""
    return True


def verify_ninja_availability() -> None:
    """Nothing: no build here needs ninja."""
