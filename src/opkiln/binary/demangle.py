"""C++ symbols as people write them: ``kernels::launch(int*)`` for ``_ZN7kernels6launchEPi``."""

from __future__ import annotations

_LONG = "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >"


def demangled(symbol: str) -> str:
    """A symbol's C++ name, by the C++ runtime; the symbol itself where it has none."""
    if not symbol.startswith("_Z"):
        return symbol
    import ctypes

    try:
        demangle = getattr(ctypes.CDLL("libstdc++.so.6"), "__cxa_demangle")
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return symbol  # no libstdc++: torch, which brings it, is not there either
    demangle.restype, free.restype = ctypes.c_void_p, None
    demangle.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    free.argtypes = (ctypes.c_void_p,)
    found = demangle(symbol.encode(), None, None, None)
    if not found:
        return symbol  # not a C++ name after all
    try:
        name = ctypes.string_at(found).decode("utf-8", "replace")
    finally:
        free(found)
    return name.replace(_LONG, "std::string")


def shown(symbol: str) -> str:
    """A symbol for a message: its C++ name, and the symbol where that is another."""
    name = demangled(symbol)
    return symbol if name == symbol else f"{name} ({symbol})"
