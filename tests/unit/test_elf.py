"""What libraries need, and files that are not what they say: a result or a LoadError, always."""

from __future__ import annotations

import os
import struct
import tracemalloc
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample.binaries import (
    CUBIN,
    DYNAMIC,
    DYNSYM,
    PTX,
    STRTAB,
    VERNEED,
    VERSYM,
    container,
    dynamic,
    image,
    library,
)
from sample.levels import AARCH64, X86_64

from opkiln.errors import LoadError
from opkiln.machine.binary import elf
from opkiln.machine.binary.fatbin import hip_images, images
from opkiln.machine.binary.source import open_source

if TYPE_CHECKING:
    from collections.abc import Callable


def everything(file: bytes | Path) -> tuple[object, ...]:
    return (
        elf.read(file),
        elf.defined_symbols(file),
        images(file),
        hip_images(file),
    )


def test_what_a_library_needs_is_read_without_what_is_weak() -> None:
    assert elf.read(dynamic()) == elf.Elf(
        X86_64,
        "shared",
        ("libb.so", "liba.so"),
        ("A_1.0",),
        (("liba.so", "f", "A_1.0"),),
    )


def linked(*symbols: tuple[bytes, int, int], numbers: bytes | None) -> bytes:
    """A library with these symbols (name, binding, section), which needs A_1.0 (2) of liba.so."""
    strings = b"\0liba.so\0A_1.0\0" + b"".join(name + b"\0" for name, _, _ in symbols)
    versions = struct.pack("<HHIII", 1, 1, 1, 16, 0) + struct.pack("<IHHII", 0, 0, 2, 9, 0)
    table = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", strings.index(name + b"\0"), binding << 4 | 2, 0, section, 0, 0)
        for name, binding, section in symbols
    )
    made = [
        (".dynstr", STRTAB, strings, 0),
        (".dynsym", DYNSYM, table, 1),
        (".gnu.version_r", VERNEED, versions, 1),
    ]
    return library(*made, *([(".gnu.version", VERSYM, numbers, 2)] if numbers is not None else []))


def test_each_symbol_is_told_with_the_library_and_the_version_it_comes_from() -> None:
    names = [(b"of_a", 1, 0), (b"of_anyone", 1, 0), (b"hidden_of_a", 1, 0), (b"weak", 2, 0)]
    file = linked(*names, numbers=struct.pack("<5H", 0, 2, 1, 0x8002, 2))
    assert elf.read(file).symbols == (
        ("", "of_anyone", ""),
        ("liba.so", "hidden_of_a", "A_1.0"),
        ("liba.so", "of_a", "A_1.0"),
    )


def test_symbols_of_a_library_without_versions_come_from_anyone() -> None:
    assert elf.read(linked((b"f", 1, 0), numbers=None)).symbols == (("", "f", ""),)


def test_a_table_of_version_numbers_that_is_too_short_is_a_load_error() -> None:
    with pytest.raises(LoadError) as raised:
        elf.read(linked((b"f", 1, 0), numbers=struct.pack("<H", 0)))
    assert "symbol 1 has no version number" in raised.value.why


def test_what_a_library_defines_is_told_without_what_it_needs_or_keeps() -> None:
    names = [(b"strong", 1, 4), (b"weak", 2, 4), (b"local", 0, 4), (b"needed", 1, 0)]
    assert elf.defined_symbols(linked(*names, numbers=None)) == {"strong", "weak"}
    with pytest.raises(LoadError):
        elf.defined_symbols(b"no library")


@pytest.mark.parametrize(("machine", "name"), [(62, X86_64), (183, AARCH64), (243, "machine 243")])
def test_the_machine_has_the_name_that_the_kernel_gives_it(machine: int, name: str) -> None:
    assert elf.read(library((".text", 1, b"", 0), machine=machine, kind=1))[:2] == (name, "object")


def test_a_real_library_of_this_process_needs_what_is_mapped() -> None:
    found = elf.read(mapped_library())
    assert found.machine == os.uname().machine
    assert found.kind == "shared"
    assert any(name.startswith(("libc.", "libm.", "ld-linux")) for name in found.needed)
    assert {soname for soname, _, _ in found.symbols if soname} <= set(found.needed)
    assert {version for _, _, version in found.symbols if version} <= set(found.versions)
    assert elf.defined_symbols(mapped_library()).isdisjoint(name for _, name, _ in found.symbols)


def test_more_sections_than_the_header_can_count_are_read() -> None:
    file = library(
        (".nv_fatbin", 1, container(image(PTX, 80)), 0), (".text", 1, b"\xc3", 0), repeat=70_000
    )
    assert images(file) == ("compute_80",)


@pytest.mark.parametrize(
    ("content", "what", "why"),
    [
        (b"", "is not an ELF file", "it is empty"),
        (b"!<arch>\nlib", "is not an ELF file", "21 3c 61 72"),
        (b"\x7fELF\x01\x01" + bytes(60), "not a 64-bit little-endian", "01 01"),
        (b"\x7fELF\x02\x02" + bytes(60), "not a 64-bit little-endian", "02 02"),
        (library((".text", 1, b"", 0), kind=4), "is damaged", "type 4"),
        (library((".text", 1, b"", 0))[:60], "is damaged", "ELF header: 64 bytes"),
        (library((".text", 1, b"", 0))[:64], "is damaged", "first section header"),
        (library((".text", 1, b"", 0))[:-1], "is damaged", "section headers"),
    ],
)
def test_what_is_no_whole_elf_file_is_a_load_error(
    content: bytes, what: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    for read in (elf.read, images, hip_images):
        with pytest.raises(LoadError) as raised:
            read(path)
        assert f"{path} " in raised.value.what
        assert what in raised.value.what
        assert why in raised.value.why


def test_what_is_no_regular_file_is_a_load_error_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, what in [
        (tmp_path / "fifo", "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "absent", "cannot be read"),
        ("with\0nul", "cannot be read"),
    ]:
        with pytest.raises(LoadError, match=what):
            images(path)


def test_a_file_that_shrinks_while_it_is_read_is_a_load_error(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(dynamic())
    with open_source(path) as source:
        os.truncate(path, 100)
        with pytest.raises(LoadError, match="while it was read"):
            source.read(64, 100, "a table")


@pytest.mark.parametrize("name", [".nv_fatbin", ".hip_fatbin", ".dynstr", ".gnu.version"])
def test_a_sparse_file_of_a_terabyte_takes_no_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    file = bytearray(dynamic())
    start = struct.unpack_from("<Q", file, 40)[0]
    index = [".dynstr", ".dynamic", ".dynsym", ".gnu.version_r", ".nv_fatbin", ".hip_fatbin",
             ".gnu.version"].index(name)  # fmt: skip
    struct.pack_into("<QQ", file, start + 64 * (index + 1) + 24, len(file), 1 << 39)
    path.write_bytes(file)
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(LoadError):
            everything(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_sections_that_lie_over_each_other_are_not_read_over_and_over() -> None:
    file = library((".nv_fatbin", 1, container(*[image(CUBIN, 80)] * 2000), 0), repeat=60_000)
    with pytest.raises(LoadError, match="present many times"):
        images(file)


def test_names_that_lie_over_each_other_do_not_multiply() -> None:
    strings = b"\0" + b"x" * 100_000 + b"\0"
    symbols = b"".join(struct.pack("<IBBHQQ", n + 1, 0x12, 0, 0, 0, 0) for n in range(50_000))
    file = library((".dynstr", STRTAB, strings, 0), (".dynsym", DYNSYM, symbols, 1))
    with pytest.raises(LoadError, match="the names overlap"):
        elf.read(file)


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (struct.pack("<HHIII", 1, 60_000, 1, 16, 0), "more records"),
        (struct.pack("<HHIII", 1, 0, 1, 0, 1) * 2, "more records"),
        (struct.pack("<HHIII", 1, 0, 1, 0, 64) * 2, "reach past"),
        (struct.pack("<HHIII", 1, 1, 1, 1 << 31, 0) * 2, "reach past"),
        (bytes(8), "reach past"),
    ],
)
def test_chains_of_versions_end(section: bytes, why: str) -> None:
    with pytest.raises(LoadError) as raised:
        elf.read(library((".dynstr", STRTAB, b"\0", 0), (".gnu.version_r", VERNEED, section, 1)))
    assert why in raised.value.why


def test_tables_without_names_or_of_broken_records_are_load_errors() -> None:
    for table in (
        [(".dynsym", DYNSYM, bytes(24), 9)],
        [(".dynsym", DYNSYM, bytes(24), 1)],
        [(".dynstr", STRTAB, b"\0", 0), (".dynsym", DYNSYM, bytes(23), 1)],
        [(".dynstr", STRTAB, b"abc", 0), (".dynamic", DYNAMIC, struct.pack("<qQ", 1, 1), 1)],
        [(".dynstr", STRTAB, b"\0", 0), (".dynamic", DYNAMIC, struct.pack("<qQ", 1, 2**64 - 1), 1)],
    ):
        with pytest.raises(LoadError):
            elf.read(library(*table))


def mapped() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[-1] for line in lines if ".so" in line})


def mapped_library() -> Path:
    """The smallest library that this process has loaded and that needs others' symbols."""
    files = [Path(path) for path in mapped() if Path(path).is_file()]
    for path in sorted(files, key=lambda path: (path.stat().st_size, path)):
        found = elf.read(path)
        if found.symbols and any(version.startswith("GLIBC_") for version in found.versions):
            return path
    pytest.skip("no library of this process needs glibc's symbols")


def mutated(
    whole: bytes, places: list[int], changes: list[tuple[int, int, int]], cut: int
) -> bytes:
    """``whole`` with numbers written over some of the places, less ``cut`` thousandths."""
    data = bytearray(whole)
    for place, width, value in changes:
        at = places[place % len(places)]
        data[at : at + width] = value.to_bytes(8, "little")[:width]
    return bytes(data[: len(data) - len(data) * cut // 1000])


def telling(whole: bytes) -> list[int]:
    """Where a change matters most: the header, the section headers, the tables that are read."""
    start = struct.unpack_from("<Q", whole, 40)[0]
    count = struct.unpack_from("<H", whole, 60)[0]
    places = [*range(64), *range(start, start + 64 * count)]
    for index in range(count):
        kind, _, _, offset, size = struct.unpack_from("<IQQQQ", whole, start + 64 * index + 4)
        if kind in {DYNAMIC, DYNSYM, VERNEED, VERSYM, STRTAB}:
            places += range(offset, offset + min(size, 512))
    return places


NUMBERS = st.one_of(
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 0xFFFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1]),
)
CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.sampled_from([1, 2, 4, 8]), NUMBERS), max_size=6
)
SHARES = st.one_of(st.just(0), st.integers(0, 1000))
MADE = dynamic()
MADE_PLACES = [at for at in range(len(MADE)) if any(MADE[max(0, at - 8) : at + 8])]


@cache
def real() -> tuple[bytes, list[int]]:
    whole = mapped_library().read_bytes()
    return whole, telling(whole)


def stands(read: Callable[[bytes], object], file: bytes) -> bool:
    """Whether it has a result; without one there is a LoadError, and no other."""
    try:
        read(file)
    except LoadError:
        return False
    return True


@settings(max_examples=15 * settings().max_examples, deadline=None)
@given(changes=CHANGES, cut=SHARES)
def test_any_change_of_a_library_with_images_gives_a_result_or_a_load_error(
    changes: list[tuple[int, int, int]], cut: int
) -> None:
    file = mutated(MADE, MADE_PLACES, changes, cut)
    readers = (elf.read, elf.defined_symbols, images, hip_images)
    results = [stands(read, file) for read in readers]
    assert all(results) or file != MADE


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(changes=CHANGES, cut=SHARES)
def test_any_change_of_a_real_library_gives_a_result_or_a_load_error(
    changes: list[tuple[int, int, int]], cut: int
) -> None:
    whole, places = real()
    file = mutated(whole, places, changes, cut)
    results = [stands(read, file) for read in (elf.read, elf.defined_symbols, images)]
    assert all(results) or file != whole


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_in_a_section_give_a_result_or_a_load_error(noise: bytes, led: bool) -> None:
    for name, read, lead in (
        (".nv_fatbin", images, container(size=len(noise))),
        (".hip_fatbin", hip_images, b"__CLANG_OFFLOAD_BUNDLE__"),
    ):
        section = (lead if led else b"") + noise
        assert stands(read, library((name, 1, section, 0))) or section.strip(b"\0")
