"""What the torch that is installed was built for, read from its files."""

from __future__ import annotations

import os


def why_without(kind: str) -> str:
    """Why torch cannot drive devices of a kind (CUDA, ROCm, XPU); empty where it can."""
    from opkiln.toolchain import torch_sdk  # not before a device is found

    try:
        sdk = torch_sdk.find()
    except OSError as error:
        return f"torch cannot be read: {error}"
    if sdk is None:
        return "torch is not installed"
    library = os.path.join(sdk.path, "lib", "libtorch_xpu.so")
    has = {"CUDA": sdk.cuda is not None, "ROCm": sdk.hip is not None}
    if has[kind] if kind in has else os.path.exists(library):
        return ""
    return f"torch {sdk.version} is built without {kind}"
