"""Reads ELF files: the machine, what a file needs, where that is found, sections and symbols.

The dynamic tables are found through the section headers, as in binutils. Only 64-bit little-endian
files are supported; those are all platforms that opkiln builds for. The dynamic linker looks for
libraries in the directories that programs and libraries name, in those of ``LD_LIBRARY_PATH``, and
in a list that ``ldconfig`` made.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from struct import Struct

from opkiln.base.lazy import Record
from opkiln.errors import LoadError
from opkiln.machine.binary.source import ByteSource, File, open_source

_MACHINES = {62: "x86_64", 183: "aarch64"}
_KINDS = {1: "object", 2: "executable", 3: "shared"}

_HEADER = Struct("<16sHHIQQQIHHHHHH")
_SECTION = Struct("<IIQQQQIIQQ")
_DYNAMIC = Struct("<qQ")
SYMBOL = Struct("<IBBHQQ")
_NEED = Struct("<HHIII")
_NEED_VERSION = Struct("<IHHII")
_VERSION_INDEX = Struct("<H")

_STRTAB, _DYNAMIC_TABLE, _NOBITS, _DYNSYM = 3, 6, 8, 11
_VERNEED, _VERSYM = 0x6FFFFFFE, 0x6FFFFFFF
_DT_NULL, _DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 0, 1, 15, 29
_WEAK_VERSION = 2
_HIDDEN = 0x8000  # a flag in a version's number
_STB_LOCAL, _STB_WEAK = 0, 2

# Each table is read into memory. The largest one of libtorch_cpu, a library of 400 MB, has 5 MB.
_LARGEST_TABLE = 1 << 28


class Elf(Record):
    """What loading needs to know about a file.

    ``machine`` is ``uname``'s name (``x86_64``, ``aarch64``), or for example ``machine 40``.
    ``kind`` is ``object``, ``executable`` or ``shared``. ``needed`` are the sonames in search
    order. ``versions`` are the symbol versions that they must have (``GLIBC_2.32``,
    ``GLIBCXX_3.4.29``), sorted. ``symbols`` are the dynamic symbols that other libraries must
    define, with their origin, sorted: (soname, symbol, version). The soname and the version are
    empty if the linker found no version. Weak versions and symbols are left out: nothing fails if
    they are missing.
    """

    machine: str
    kind: str
    needed: tuple[str, ...]
    versions: tuple[str, ...]
    symbols: tuple[tuple[str, str, str], ...]


class ElfSection(Record):
    """One section: its name, its type, and where its bytes are (NOBITS sections have none)."""

    name: str
    kind: int
    link: int
    offset: int
    size: int


def read(file: File) -> Elf:
    """Read a library, object or executable. Raises LoadError if it is something else or damaged."""
    with open_source(file) as source:
        kind, machine, table = _tables(source)
        versions = tuple(_versions(source, table))
        return Elf(
            _MACHINES.get(machine, f"machine {machine}"),
            _KINDS[kind],
            tuple(_dynamic_strings(source, table, _DT_NEEDED)),
            tuple(sorted({each.name for each in versions if not each.weak})),
            tuple(sorted(set(_undefined_symbols(source, table, versions)))),
        )


def find_ninja_fault(path: str) -> str:
    """Why a library cannot take the place of a ninja's calls; empty if it can, or if the file is a
    script, which starts another."""
    try:
        with open(path, "rb") as file:
            if file.read(2) == b"#!":
                return ""
        found = read(path)
    except (OSError, LoadError):
        return "it cannot be read"
    if not found.needed:
        return "it is linked statically"
    if not any(each.startswith("libc.so.") for each in found.needed):
        return f"it is linked to {', '.join(found.needed)}, not to this machine's C library"
    # Whoever gives a child its output by this call starts it by the one that goes with it.
    if not any(symbol.endswith("_spawn_file_actions_adddup2") for _, symbol, _ in found.symbols):
        return "it starts commands in a way that is not known"
    return ""


def defined_symbols(file: File) -> frozenset[str]:
    """The dynamic symbols that a library defines for others, including weak ones. Raises LoadError
    as ``read`` does."""
    with open_source(file) as source:
        return frozenset(_defined_names(source, _tables(source)[2]))


def search_path(file: File) -> tuple[str, ...]:
    """The directories where the dynamic linker looks for what a program or library needs, as they
    are written in it. Raises LoadError as ``read`` does."""
    with open_source(file) as source:
        lists = _dynamic_strings(source, _tables(source)[2], _DT_RPATH, _DT_RUNPATH)
        return tuple(each for listed in lists for each in listed.split(":") if each)


def sections(source: ByteSource, name: str) -> Iterator[tuple[int, ByteSource]]:
    """(offset, source up to the section's end) of each section of this name that has bytes. Raises
    LoadError if a section is not completely inside the file."""
    found = [each for each in _tables(source)[2] if each.name == name and each.kind != _NOBITS]
    # If sections overlapped, the same bytes would be read many times.
    if sum(section.size for section in found) > source.size:
        raise source.damage(f"section {name}: larger than the file, or present many times")
    for section in found:
        end = section.offset + section.size
        if end > source.size:
            raise source.damage(
                f"section {name}: {section.size} bytes at {section.offset:#x} reach past the end "
                f"at {source.size:#x}"
            )
        yield section.offset, source.until(end)


def _tables(source: ByteSource) -> tuple[int, int, tuple[ElfSection, ...]]:
    magic = source.read(0, min(6, source.size), "ELF header")
    if magic[:4] != b"\x7fELF":
        raise LoadError(f"{source.name} is not an ELF file", why=_show_beginning(magic))
    if magic[4:] != b"\x02\x01":
        raise LoadError(
            f"{source.name} is not a 64-bit little-endian ELF file", why=_show_beginning(magic)
        )
    header = source.unpack(_HEADER, 0, "ELF header")
    _, kind, machine, _, _, _, start, _, _, _, _, width, count, names = header
    if kind not in _KINDS:
        raise source.damage(f"ELF header: type {kind} is not a library, object or executable")
    if not start:
        raise source.damage("ELF header: there are no section headers")
    if width != _SECTION.size:
        raise source.damage(f"ELF header: section headers have {width} bytes, not {_SECTION.size}")
    first = source.unpack(_SECTION, start, "first section header")
    # With 0xff00 sections or more, the numbers do not fit the header. Then they are in the first
    # section's header.
    count = count or first[5]
    names = first[6] if names == 0xFFFF else names
    headers = _read_whole(source, start, count * width, "section headers")
    raw = list(_SECTION.iter_unpack(headers))
    if names >= len(raw):
        raise source.damage(
            f"ELF header: the section names are in section {names}, but there are {len(raw)}"
        )
    strings = _Strings(source, raw[names][4], raw[names][5], "section names")
    table = tuple(
        ElfSection(strings.name_at(each[0]), each[1], each[6], each[4], each[5]) for each in raw
    )
    return kind, machine, table


def _dynamic_strings(
    source: ByteSource, table: tuple[ElfSection, ...], *tags: int
) -> Iterator[str]:
    for section in _sections_of(table, _DYNAMIC_TABLE):
        strings = _names_of(source, table, section)
        for tag, value in _records(source, section, _DYNAMIC):
            if tag == _DT_NULL:
                break
            if tag in tags:
                yield strings.name_at(value)


class _Version(Record):
    """A required version of a library's symbols, and its number in this file."""

    soname: str
    name: str
    number: int
    weak: bool


def _undefined_symbols(
    source: ByteSource, table: tuple[ElfSection, ...], versions: tuple[_Version, ...]
) -> Iterator[tuple[str, str, str]]:
    needed = {each.number: (each.soname, each.name) for each in versions}
    for section in _sections_of(table, _DYNSYM):
        strings = _names_of(source, table, section)
        numbered = _sections_of(table, _VERSYM)  # a library without versions has none
        indices = [i for each in numbered for (i,) in _records(source, each, _VERSION_INDEX)]
        symbols = _records(source, section, SYMBOL)
        for position, (name, info, _, defined_in, _, _) in enumerate(symbols):
            if name and not defined_in and info >> 4 not in {_STB_LOCAL, _STB_WEAK}:
                if indices and position >= len(indices):
                    raise source.damage(
                        f"section {section.name}: symbol {position} has no version number"
                    )
                index = indices[position] & ~_HIDDEN if indices else 0
                soname, version = needed.get(index, ("", ""))
                yield soname, strings.name_at(name), version


def _defined_names(source: ByteSource, table: tuple[ElfSection, ...]) -> Iterator[str]:
    for section in _sections_of(table, _DYNSYM):
        strings = _names_of(source, table, section)
        for name, info, _, defined_in, _, _ in _records(source, section, SYMBOL):
            if name and defined_in and info >> 4 != _STB_LOCAL:
                yield strings.name_at(name)


def _versions(source: ByteSource, table: tuple[ElfSection, ...]) -> Iterator[_Version]:
    for section in _sections_of(table, _VERNEED):
        strings = _names_of(source, table, section)
        data = _read_whole(source, section.offset, section.size, section.name)
        inside = ByteSource(source.name, section.size, held=data)
        # A chain of libraries, each with a chain of versions. In a valid file no record is in two
        # chains, so there are no more records than fit into the section.
        left = section.size // _NEED.size
        at = 0
        while section.size:
            _, count, soname, first, following = inside.unpack(_NEED, at, section.name)
            left -= 1 + count
            if left < 0:
                raise source.damage(f"section {section.name}: more records than it has room for")
            position = at + first
            for _ in range(count):
                record = inside.unpack(_NEED_VERSION, position, section.name)
                _, flags, index, name, step = record
                weak = bool(flags & _WEAK_VERSION)
                yield _Version(
                    strings.name_at(soname), strings.name_at(name), index & ~_HIDDEN, weak
                )
                position += step
            if not following:
                break
            at += following


class _Strings:
    """A string table. Limits the total length of names, so that overlapping names cannot use up
    the memory."""

    def __init__(self, source: ByteSource, offset: int, size: int, what: str) -> None:
        self._source = source
        self._what = what
        self._table = _read_whole(source, offset, size, what)
        self._known: dict[int, str] = {}
        # Linkers let names share their tails. No linker reaches eight times the table's size.
        self._left = 8 * size

    def name_at(self, offset: int) -> str:
        """The name at an offset. Raises LoadError if the table ends before the name does."""
        known = self._known.get(offset)
        if known is not None:
            return known
        end = self._table.find(b"\0", offset)
        if end < 0:
            raise self._source.damage(f"{self._what}: the name at {offset:#x} has no end")
        self._left -= end - offset
        if self._left < 0:
            raise self._source.damage(f"{self._what}: the names overlap")
        name = self._table[offset:end].decode("utf-8", "backslashreplace")
        self._known[offset] = name
        return name


def _sections_of(table: tuple[ElfSection, ...], kind: int) -> list[ElfSection]:
    # There is at most one table of each kind, and the dynamic linker also uses only one.
    return [section for section in table if section.kind == kind][:1]


def _names_of(source: ByteSource, table: tuple[ElfSection, ...], section: ElfSection) -> _Strings:
    if section.link >= len(table) or table[section.link].kind != _STRTAB:
        raise source.damage(f"section {section.name}: its names are not in a string table")
    strings = table[section.link]
    return _Strings(source, strings.offset, strings.size, f"section {strings.name}")


def _records(source: ByteSource, section: ElfSection, layout: Struct) -> Iterator[tuple[int, ...]]:
    if section.size % layout.size:
        raise source.damage(
            f"section {section.name}: {section.size} bytes are not a multiple of {layout.size}"
        )
    return layout.iter_unpack(
        _read_whole(source, section.offset, section.size, f"section {section.name}")
    )


def _read_whole(source: ByteSource, offset: int, size: int, what: str) -> bytes:
    if size > _LARGEST_TABLE:
        raise source.damage(f"{what}: {size} bytes are more than the limit of {_LARGEST_TABLE}")
    return source.read(offset, size, what)


def _show_beginning(magic: bytes) -> str:
    return f"it begins with {magic.hex(' ')}" if magic else "it is empty"


_HEAD, _WORD, _LONG = Struct("<IIII"), Struct("<I"), Struct("<Q")
_UNDEFINED = 0


def missing_symbols(file: File, names: Iterable[str]) -> tuple[str, ...]:
    """The ``names`` that a library does not define, in the given order. Raises LoadError."""
    with open_source(file) as source:
        table = _HashTable(source)
        if table.usable:
            return tuple(name for name in names if not table.has(name))
    has = defined_symbols(file)  # the library has an older kind of hash table, or none
    return tuple(name for name in names if name not in has)


class _HashTable:
    """A ``.gnu.hash`` section, with its symbols and their names."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        names = (".gnu.hash", ".dynsym", ".dynstr")
        hashes, symbols, strings = (list(sections(source, name)) for name in names)
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
            if found | 1 == wanted | 1 and self._is_named(index, name):
                return True
            if found & 1:
                return False
            index += 1

    def _word(self, at: int) -> int:
        (value,) = self._hashes.unpack(_WORD, at, ".gnu.hash")
        return int(value)

    def _is_named(self, index: int, name: str) -> bool:
        at = self._symbols_at + SYMBOL.size * index
        string, _, _, section, _, _ = self._symbols.unpack(SYMBOL, at, ".dynsym")
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


def demangle(symbol: str) -> str:
    """A symbol's C++ name, from the C++ runtime. Returns the symbol itself if it has none."""
    if not symbol.startswith("_Z"):
        return symbol
    from opkiln.machine.nvrtc.names import demangler

    try:
        name = demangler()(symbol)
    except (OSError, AttributeError):
        return symbol  # there is no libstdc++, so there is no torch either
    return name.replace(_STRING, "std::string")


def show_symbol(symbol: str) -> str:
    """A symbol for a message: its C++ name, and the symbol too if the two differ."""
    name = demangle(symbol)
    return symbol if name == symbol else f"{name} ({symbol})"


PRELOADS = "/etc/ld.so.preload"  # names libraries that are loaded into every program
LIST = "/etc/ld.so.cache"

# Subdirectories that the dynamic linker prefers. Since 2.37 glibc only knows the first. The others
# are those of older versions on x86-64 and aarch64 (``ld.so --help`` lists them).
_PREFERRED = ("glibc-hwcaps", "tls", "aarch64", "atomics", "x86_64", "haswell", "xeon_phi",
              "avx512_1")  # fmt: skip


def search(directories: Iterable[str], libraries: Iterable[str]) -> tuple[list[str], list[str]]:
    """(the paths that do not exist, the files that do) where the dynamic linker would look for
    these libraries. A file that was not loaded comes later, or does not suit this machine; with
    other contents it may be loaded."""
    names = (*_PREFERRED, *libraries)
    absent, there = [], []
    waiting = list(directories)
    entered = set()
    for directory in waiting:  # it grows
        candidates = [os.path.join(directory, name) for name in names]
        preferred, files = candidates[: len(_PREFERRED)], candidates[len(_PREFERRED) :]
        absent += [path for path in candidates if not os.path.exists(path)]
        there += [path for path in files if os.path.isfile(path) and os.access(path, os.R_OK)]
        real = os.path.realpath(directory)
        if real not in entered:
            entered.add(real)
            hwcaps = preferred[0]  # it has a directory for each kind of machine
            names_in = os.listdir(hwcaps) if os.path.isdir(hwcaps) else ()
            inside = (os.path.join(hwcaps, name) for name in names_in)
            waiting += filter(os.path.isdir, (*preferred, *inside))
    return absent, there


_MAGIC, _CACHE_HEADER, _ENTRY = b"glibc-ld.so.cache1.1", 48, struct.Struct("<iIIIQ")


def read_list(file: str, names: Iterable[str]) -> list[str]:
    """The entries of libraries in the dynamic linker's list: each name, followed by its paths. For
    a list that is not glibc's, the digest of the whole list replaces the paths. Raises OSError."""
    found = {name.encode(): [name] for name in sorted(names)}
    try:
        with open(file, "rb") as opened:
            data = opened.read()
    except FileNotFoundError:
        data = b""
    try:
        begin = data.index(_MAGIC)  # the same list in an older form may come before it
        (count,) = struct.unpack_from("<I", data, begin + len(_MAGIC))
        for number in range(count):
            place = begin + _CACHE_HEADER + number * _ENTRY.size
            _, name, path, _, _ = _ENTRY.unpack_from(data, place)
            paths = found.get(_text(data, begin + name))
            if paths is not None:
                paths.append(os.fsdecode(_text(data, begin + path)))
    except (struct.error, ValueError):
        return ["".join(each) + "/" + hashlib.sha256(data).hexdigest() for each in found.values()]
    return ["".join(each) for each in found.values()]


def _text(data: bytes, place: int) -> bytes:
    return data[place : data.index(b"\0", place)]
