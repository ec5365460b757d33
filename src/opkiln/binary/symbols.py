"""Symbols of a library: which ones it exports, and their C++ names.

Exported symbols are looked up in the hash table, as the dynamic linker does. Each takes a few
reads. Reading all names of libtorch_cpu.so would take a quarter of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from opkiln.binary import elf
from opkiln.binary.source import File, Source, opened

_HEAD, _WORD, _LONG = Struct("<IIII"), Struct("<I"), Struct("<Q")
_UNDEFINED = 0


def missing(file: File, names: Iterable[str]) -> tuple[str, ...]:
    """The ``names`` that a library does not define, in the given order. Raises LoadError."""
    with opened(file) as source:
        table = _Table(source)
        if table.usable:
            return tuple(name for name in names if not table.has(name))
    has = elf.defined(file)  # the library has an older kind of hash table, or none
    return tuple(name for name in names if name not in has)


class _Table:
    """A ``.gnu.hash`` section, with its symbols and their names."""

    def __init__(self, source: Source) -> None:
        self._source = source
        names = (".gnu.hash", ".dynsym", ".dynstr")
        hashes, symbols, strings = (list(elf.sections(source, name)) for name in names)
        self.usable = len(hashes) == len(symbols) == len(strings) == 1
        if not self.usable:
            return
        ((at, self._hashes),) = hashes
        ((self._symbols_at, self._symbols),) = symbols
        ((self._strings_at, self._strings),) = strings
        self._count, self._first, self._words, self._shift = self._hashes.unpack(
            _HEAD, at, ".gnu.hash"
        )
        self.usable = self._count > 0 and self._words > 0
        self._filter_at = at + _HEAD.size
        self._buckets_at = self._filter_at + 8 * self._words
        self._chains_at = self._buckets_at + 4 * self._count

    def has(self, name: str) -> bool:
        """Whether the library defines a symbol. Raises LoadError for a damaged table."""
        wanted = _hash(name)
        at = self._filter_at + 8 * (wanted // 64 % self._words)
        (bits,) = self._hashes.unpack(_LONG, at, ".gnu.hash")
        if not (bits >> wanted % 64) & (bits >> (wanted >> self._shift) % 64) & 1:
            return False
        index = self._word(self._buckets_at + 4 * (wanted % self._count))
        if index < self._first:
            return False
        while True:  # a chain without an end gives an error at the end of the section
            found = self._word(self._chains_at + 4 * (index - self._first))
            if found | 1 == wanted | 1 and self._is(index, name):
                return True
            if found & 1:
                return False
            index += 1

    def _word(self, at: int) -> int:
        (value,) = self._hashes.unpack(_WORD, at, ".gnu.hash")
        return int(value)

    def _is(self, index: int, name: str) -> bool:
        at = self._symbols_at + elf.SYMBOL.size * index
        string, _, _, section, _, _ = self._symbols.unpack(elf.SYMBOL, at, ".dynsym")
        start, text = self._strings_at + string, name.encode() + b"\0"
        if section == _UNDEFINED or start + len(text) > self._strings.size:
            return False
        return self._strings.read(start, len(text), ".dynstr") == text


def _hash(name: str) -> int:
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


# C++ names: ``kernels::launch(int*)`` for ``_ZN7kernels6launchEPi``

_STRING = "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >"


def demangled(symbol: str) -> str:
    """A symbol's C++ name, from the C++ runtime. Returns the symbol itself if it has none."""
    if not symbol.startswith("_Z"):
        return symbol
    from opkiln.nvrtc.names import demangler

    try:
        name = demangler()(symbol)
    except (OSError, AttributeError):
        return symbol  # there is no libstdc++, so there is no torch either
    return name.replace(_STRING, "std::string")


def shown(symbol: str) -> str:
    """A symbol for a message: its C++ name, and the symbol too if the two differ."""
    name = demangled(symbol)
    return symbol if name == symbol else f"{name} ({symbol})"
