"""What of ``torch.utils.cpp_extension`` is opkiln's while ``compat.patch`` is in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

# The others of ``compat.torch`` are torch's own, or ask the same of the machine.
_NAMES = (
    "load", "load_inline", "BuildExtension", "CppExtension", "CUDAExtension", "SyclExtension",
    "verify_ninja_availability", "is_ninja_available", "get_compiler_abi_compatibility_and_version",
)  # fmt: skip


def replacements(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Owner, attribute and value of each exchange."""
    from opkiln.compat import torch

    for name in _NAMES:
        yield module, name, getattr(torch, name)
