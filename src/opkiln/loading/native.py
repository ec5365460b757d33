"""Opening a verified file in this process, by its kind."""

from __future__ import annotations

import os
from typing import Any

from opkiln.errors import LoadError
from opkiln.model import ABI_NONE, EXECUTABLE, LIBRARY, PLAIN, PYTHON, XPU, OpSpec


def open_artifact(spec: OpSpec, path: str) -> Any:
    """The loaded thing: an extension module, a CDLL, a path; None for a torch library.

    Raises LoadError with what the dynamic linker said.
    """
    try:
        if spec.kind == EXECUTABLE:
            return path
        if spec.abi != ABI_NONE or spec.kind == LIBRARY:
            import torch
        if spec.backend == XPU:
            _load_libsycl(path)
        if spec.kind == LIBRARY:
            if path.startswith("/proc/"):
                # In memory (store.archive). torch would open what the link leads to, which is no
                # file.
                _open_library(path)
                torch.ops.loaded_libraries.add(path)
            else:
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]
            return None
        if spec.kind == PLAIN:
            return _open_library(path)
        return _import_module(spec.name, path)
    except (OSError, ImportError) as error:
        hint = ""
        if spec.kind == PYTHON and "PyInit_" in str(error):
            hint = "is_python_module=False    # there is no PYBIND11_MODULE in it"
        raise LoadError(
            f"{spec.name} cannot be loaded from {path}", why=str(error), hint=hint
        ) from error


def _open_library(path: str) -> Any:
    import ctypes

    return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)


def _load_libsycl(path: str) -> None:
    """Load the SYCL runtime that a library needs: it names it by its soname alone."""
    import ctypes

    from opkiln.binary import elf
    from opkiln.toolchain import libsycl

    for name in filter(libsycl.is_library, elf.read(path).needed):
        try:
            # First the one that is loaded, by torch say: a second copy would know other devices.
            ctypes.CDLL(name)
        except OSError:
            if located := libsycl.locate(name):
                ctypes.CDLL(located)


def _import_module(name: str, path: str) -> Any:
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    loader = ExtensionFileLoader(name, path)
    spec = spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is not an extension module")
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
