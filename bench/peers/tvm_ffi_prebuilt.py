"""tvm-ffi: its finished library loaded by path, with no look at the sources and no ninja."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from peers import tvm_ffi_inline


def bring() -> None:
    """Import what a program that only loads imports."""
    import tvm_ffi  # noqa: F401


def load() -> Any:
    """The module that ``tvm_ffi_inline`` built."""
    import tvm_ffi

    (library,) = Path(os.environ["TVM_FFI_CACHE_DIR"]).glob("twice_tvm_*/twice_tvm.so")
    return tvm_ffi.load_module(str(library))


check = tvm_ffi_inline.check
