"""tvm-ffi: the same one-line op from a file, by its load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers import tvm_ffi_inline

bring = tvm_ffi_inline.bring
check = tvm_ffi_inline.check


def load() -> Any:
    """The module, built first where it is not."""
    import tvm_ffi.cpp

    source = Path(__file__).parent.parent / "sources" / "twice_tvm_file.cpp"
    return tvm_ffi.cpp.load(name="twice_tvm_file", sources=[str(source)])
