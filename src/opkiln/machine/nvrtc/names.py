"""Finds the kernels that the host's assembly text refers to, and their names in C++."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

_NAME = re.compile(r"[A-Za-z_$][\w$.]*")
_LABEL = re.compile(r"^([A-Za-z_$][\w$.]*):", re.MULTILINE)
# Lines that contain symbols without referring to them.
_SAYS = re.compile(
    r"\s*\.(string|ascii|asciz|file|ident|section|type|size|globl|global|weak|hidden|loc|cfi_\w+)\b"
)
_ANONYMOUS = "(anonymous namespace)::"


class UnnamedKernel(Exception):
    """A kernel instance that cannot be named in C++; the message says which."""


def find_references(assembly: str, kernels: frozenset[str]) -> list[str]:
    """The symbols of these kernels that the text uses and does not define, in order."""
    if not kernels:
        return []
    wanted = re.compile("|".join(rf"(?<=\d){re.escape(name)}" for name in sorted(kernels)))
    defined = set(_LABEL.findall(assembly))
    found: dict[str, None] = {}
    for line in assembly.splitlines():
        if _SAYS.match(line) is None:
            found.update(dict.fromkeys(_NAME.findall(line)))
    return [
        symbol
        for symbol in found
        if symbol not in defined
        and (symbol in kernels or (symbol.startswith("_Z") and wanted.search(symbol)))
    ]


def expression(
    symbol: str, kernels: frozenset[str], unnamed: str, demangle: Callable[[str], str]
) -> str:
    """The name expression of a kernel for NVRTC: ``gelu<float, 4>``. Empty if the symbol is not one
    of these kernels. ``unnamed`` is the name of unnamed namespaces in the host's code. Raises
    UnnamedKernel."""
    if not symbol.startswith("_Z"):
        return symbol if symbol in kernels else ""
    written = demangle(symbol).replace(_ANONYMOUS, "").replace(f"{unnamed}::", "")
    name = _drop_parameters(written).removeprefix("void ")
    if not is_one_of(name, kernels):
        return ""
    if "{lambda" in name or "{unnamed" in name or "'lambda" in name:
        raise UnnamedKernel(
            f"{name}: a template argument of this kernel is a lambda or a type without a name"
        )
    return name


def is_one_of(expression: str, kernels: frozenset[str]) -> bool:
    """Whether a name expression is of one of these kernels: ``a::k<float>`` is of ``k``."""
    while (shorter := re.sub(r"<[^<>]*>", "", expression)) != expression:
        expression = shorter  # without template arguments, from the innermost
    return expression.rpartition("::")[2] in kernels


def rename_symbols(assembly: str, symbols: list[str], suffix: str) -> str:
    """The text with a suffix at each of these symbols, so that a static function of one source does
    not collide with one of the same name in another."""
    if not symbols:
        return assembly
    words = "|".join(re.escape(symbol) for symbol in symbols)
    return re.sub(rf"(?<![\w$.])(?:{words})(?![\w$.])", rf"\g<0>{suffix}", assembly)


def _drop_parameters(text: str) -> str:
    """``void a::k<int (*)(int)>(float*)`` -> ``void a::k<int (*)(int)>``."""
    if not text.endswith(")"):
        return text
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[index], 0)
        if depth == 0:
            return text[:index]
    return text


def demangler() -> Callable[[str], str]:
    """A function that writes a symbol as C++ does. Raises OSError where libstdc++ is not found."""
    library = ctypes.CDLL("libstdc++.so.6")
    function = library["__cxa_demangle"]
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    free = ctypes.CDLL(None)["free"]
    free.argtypes = [ctypes.c_void_p]

    def demangle(symbol: str) -> str:
        text = function(symbol.encode(), None, None, None)
        if not text:
            return symbol
        try:
            return ctypes.string_at(text).decode("utf-8", "replace")
        finally:
            free(text)

    return demangle
