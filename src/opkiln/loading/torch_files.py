"""What torch would bring, asked of its files where nobody has imported it yet."""

from __future__ import annotations

import os

from opkiln.toolchain import torch_sdk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_OF_TORCH = ("libtorch", "libc10")


def locate(soname: str) -> str:
    """The file of a library that importing torch brings: its own, or of the packages it needs."""
    if (sdk := torch_sdk.find()) is None:
        return ""
    own = os.path.join(sdk.path, "lib", soname)
    if os.path.exists(own):
        return own
    from glob import glob

    packages = os.path.join(os.path.dirname(sdk.path), "nvidia", "*", "lib", soname)
    return next(iter(glob(packages)), "")


def missing(files: Iterable[str], symbols: list[str]) -> list[str]:
    """The symbols that none of these files has. Raises LoadError for a file that is no library."""
    from opkiln.binary.symbols import missing

    for file in files:
        symbols = [*missing(file, symbols)]
    return symbols


def named(sonames: Iterable[str]) -> str:
    """``torch 2.13.0``, for a library that is linked to it; who should have had its symbols."""
    sdk = torch_sdk.find()
    if sdk is None or not any(soname.startswith(_OF_TORCH) for soname in sonames):
        return "no library here"
    return f"torch {sdk.version}"
