"""Reading libraries: GPU images, what is needed, and files that are not what they say."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opkiln.binary import elf
from opkiln.binary.bundle import hip_images
from opkiln.binary.fatbin import images, relocatable_images
from opkiln.binary.source import opened
from opkiln.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable

PTX, CUBIN, LTO = 1, 2, 8
A, F = 1 << 20, 1 << 21
STRTAB, DYNAMIC, NOBITS, DYNSYM, VERNEED = 3, 6, 8, 11, 0x6FFFFFFE


def image(
    kind: int, arch: int, flags: int = 0, *, version: int = 0x101, header: int = 64, size: int = 24
) -> bytes:
    """One entry of a fat binary, as nvcc writes it."""
    words = struct.pack("<HHIQIIHHIIIQ", kind, version, header, size, 0, 0, 8, 1, arch, 0, 0,
                        0x11 | flags)  # fmt: skip
    return words.ljust(header, b"\0") + b"\x28" * 24


def container(
    *entries: bytes, version: int = 1, header: int = 16, size: int | None = None
) -> bytes:
    body = b"".join(entries)
    size = len(body) if size is None else size
    return struct.pack("<IHHQ", 0xBA55ED50, version, header, size) + body


def bundle(*targets: str, entries: int | None = None, size: int = 32) -> bytes:
    """An offload bundle, as clang writes it: the host's empty entry, then the targets'."""
    ids = [b"host-x86_64-unknown-linux", *(target.encode() for target in targets)]
    table = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack(
        "<Q", len(ids) if entries is None else entries
    )
    offset = 4096
    for index, each in enumerate(ids):
        table += struct.pack("<QQQ", offset, size if index else 0, len(each)) + each
        offset += size if index else 0
    return table.ljust(4096, b"\0") + b"\x7f" * (32 * len(targets))


def packed(whole: bytes, *, version: int = 3, method: int = 0, size: int | None = None) -> bytes:
    body = zlib.compress(whole)
    sizes = "<II8s" if version == 2 else "<QQ8s"
    header = 8 + struct.calcsize(sizes)
    size = header + len(body) if size is None else size
    return struct.pack("<4sHH", b"CCOB", version, method) + struct.pack(
        sizes, size, len(whole), b"hashhash"
    ) + body  # fmt: skip


def library(
    *sections: tuple[str, int, bytes, int], kind: int = 3, machine: int = 62, repeat: int = 0
) -> bytes:
    """A file of these sections (name, type, bytes, link), numbered from 1; names come last."""
    names, body, headers = b"\0.shstrtab\0", b"", [bytes(64)]
    listed = [*sections, *([sections[-1]] * repeat)]
    placed: dict[int, tuple[int, int]] = {}
    for name, type_, data, link in listed:
        if id(data) not in placed:
            placed[id(data)] = (len(names), 64 + len(body))
            names += name.encode() + b"\0"
            body += data + bytes(-len(data) % 8)
        at_name, offset = placed[id(data)]
        headers.append(struct.pack("<IIQQQQIIQQ", at_name, type_, 0, 0, offset, len(data),
                                   link, 0, 8, 0))  # fmt: skip
    headers.append(struct.pack("<IIQQQQIIQQ", 1, STRTAB, 0, 0, 64 + len(body), len(names),
                               0, 0, 1, 0))  # fmt: skip
    body += names + bytes(-len(names) % 8)
    count, last = len(headers), len(headers) - 1
    if count >= 0xFF00:  # then both numbers are in the first header
        headers[0] = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, count, last, 0, 0, 0)
        count, last = 0, 0xFFFF
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", kind, machine, 1, 0, 0,
                         64 + len(body), 0, 64, 56, 0, 64, count, last)  # fmt: skip
    return header + body + b"".join(headers)


def cuda(*containers: bytes, name: str = ".nv_fatbin") -> bytes:
    return library((name, 1, b"".join(containers), 0))


def hip(*bundles: bytes) -> bytes:
    return library((".hip_fatbin", 1, b"".join(bundles), 0))


def dynamic(strings: bytes = b"\0liba.so\0libb.so\0A_1.0\0A_1.1\0f\0g\0") -> bytes:
    """A library that needs libb.so and liba.so (A_1.0; A_1.1 weakly), and f; g is weak."""
    tags = [(1, 9), (1, 1), (12, 0), (0, 0), (1, 1)]
    at = {name: strings.index(name) for name in (b"A_1.0", b"A_1.1", b"f\0", b"g\0")}
    symbols = [
        (0, 0, 0),
        (at[b"f\0"], 0x12, 0),  # global, undefined
        (at[b"g\0"], 0x22, 0),  # weak, undefined
        (1, 0x12, 3),  # defined here
        (9, 0x02, 0),  # local
    ]
    versions = struct.pack("<HHIII", 1, 2, 1, 16, 0)
    versions += struct.pack("<IHHII", 0, 0, 2, at[b"A_1.0"], 16)
    versions += struct.pack("<IHHII", 0, 2, 3, at[b"A_1.1"], 0)
    return library(
        (".dynstr", STRTAB, strings, 0),
        (".dynamic", DYNAMIC, b"".join(struct.pack("<qQ", *tag) for tag in tags), 1),
        (".dynsym", DYNSYM,
         b"".join(struct.pack("<IBBHQQ", n, i, 0, s, 0, 0) for n, i, s in symbols), 1),
        (".gnu.version_r", VERNEED, versions, 1),
        (".nv_fatbin", 1, container(image(CUBIN, 90, A)) + bytes(8) + container(), 0),
        (".hip_fatbin", 1, bundle("hipv4-amdgcn-amd-amdhsa--gfx90a") + packed(
            bundle("hip-amdgcn-amd-amdhsa--gfx1030")), 0),
    )  # fmt: skip


def everything(file: bytes | Path) -> tuple[object, ...]:
    return elf.read(file), images(file), relocatable_images(file), hip_images(file)


@pytest.mark.parametrize(
    ("kind", "arch", "flags", "expected"),
    [
        (CUBIN, 80, 0, "sm_80"),
        (CUBIN, 90, A, "sm_90a"),
        (CUBIN, 100, F, "sm_100f"),
        (CUBIN, 121, A | 1 << 24, "sm_121a"),
        (CUBIN, 120, F | 0x8000, "sm_120f"),  # packed with zstd
        (CUBIN, 90, A | 0x2000, "sm_90a"),  # packed with LZ4
        (PTX, 75, 0, "compute_75"),
        (PTX, 90, A | 0x8000, "compute_90a"),
        (PTX, 100, F, "compute_100f"),
        (LTO, 90, A, "lto_90a"),
    ],
)
def test_an_image_is_named_by_its_entrys_header_alone(
    kind: int, arch: int, flags: int, expected: str
) -> None:
    assert images(cuda(container(image(kind, arch, flags)))) == (expected,)


def test_images_are_in_numeric_order_machine_code_first_and_each_once() -> None:
    units = [
        container(image(PTX, 90), image(CUBIN, 100), image(CUBIN, 90, A), image(CUBIN, 90)),
        container(image(CUBIN, 80), image(LTO, 80), image(PTX, 100, F), image(CUBIN, 90)),
    ]
    assert images(cuda(*units)) == (
        "sm_80", "sm_90", "sm_90a", "sm_100", "compute_90", "compute_100f", "lto_80",
    )  # fmt: skip


def test_containers_may_be_padded_and_empty() -> None:
    file = cuda(
        bytes(24),
        container(image(CUBIN, 75)),
        bytes(70_000),
        container(),
        container(image(PTX, 75)),
    )
    assert images(file) == ("sm_75", "compute_75")


def test_longer_headers_and_unknown_kinds_are_passed_over() -> None:
    longer = image(CUBIN, 103, A, header=120)
    assert images(cuda(container(image(64, 0), longer, image(16, 90)))) == ("sm_103a",)


def test_a_file_without_images_has_none() -> None:
    plain = library((".text", 1, b"\xc3", 0))
    assert everything(plain) == (elf.Elf("x86_64", "shared", (), (), ()), (), (), ())
    nobits = library((".nv_fatbin", NOBITS, b"\xc3", 0))
    assert images(nobits) == ()


def test_the_inputs_of_a_device_link_are_no_images_of_the_library() -> None:
    file = library(
        (".nv_fatbin", 1, container(image(CUBIN, 90)), 0),
        ("__nv_relfatbin", 1, container(image(PTX, 75), image(CUBIN, 120)), 0),
    )
    assert images(file) == ("sm_90",)
    assert relocatable_images(file) == ("sm_120", "compute_75")


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (b"\x50\xed\x55", "reach past the end"),
        (b"not a fat binary", "begins no fat binary"),
        (container(image(CUBIN, 80)) + b"\0\0\1", "reach past the end"),
        (container(image(CUBIN, 80)) + b"\0\1" * 16, "begins no fat binary"),
        (container(image(CUBIN, 80), version=2), "version 2"),
        (container(image(CUBIN, 80), header=8), "header of 8 bytes"),
        (container(image(CUBIN, 80), size=1 << 63), "reaches past the section's end"),
        (container(image(CUBIN, 80, size=1 << 63)), "reaches past its fat binary's end"),
        (container(image(CUBIN, 80, size=25)), "reaches past its fat binary's end"),
        (container(image(CUBIN, 80, version=0x201)), "version 0x201"),
        (container(image(CUBIN, 80, header=0)), "header of 0 bytes"),
        (container(image(CUBIN, 0)), "architecture 0"),
        (container(image(CUBIN, 0x5A00)), "architecture 23040"),
        (container(image(CUBIN, 90, A | F)), "flags 0x300011"),
        (bytes(1 << 22), "nothing but zeros"),
    ],
)
def test_a_damaged_fat_binary_is_a_load_error_that_says_where(section: bytes, why: str) -> None:
    with pytest.raises(LoadError) as raised:
        images(cuda(section))
    assert why in raised.value.why
    assert "readelf" in raised.value.hint


def test_hip_targets_keep_their_features_and_the_host_is_none_of_them() -> None:
    first = bundle(
        "hipv4-amdgcn-amd-amdhsa--gfx1030", "hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-"
    )
    second = bundle("hip-amdgcn-amd-amdhsa-unknown-gfx906", "hip-amdgcn-amd-amdhsa--gfx9-4-generic")
    assert hip_images(hip(first, bytes(4096), second)) == (
        "gfx906", "gfx90a:sramecc+:xnack-", "gfx1030", "gfx9-4-generic",
    )  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_a_packed_bundle_is_listed_too(version: int) -> None:
    whole = bundle("hipv4-amdgcn-amd-amdhsa--gfx942:xnack+")
    file = hip(packed(whole, version=version), bytes(64), bundle("hip-amdgcn-amd-amdhsa--gfx1100"))
    assert hip_images(file) == ("gfx942:xnack+", "gfx1100")


def test_a_packed_bundle_may_unpack_to_far_more_than_is_held() -> None:
    whole = bundle("hipv4-amdgcn-amd-amdhsa--gfx942") + bytes(1 << 26)
    file = hip(packed(whole))
    tracemalloc.start()
    try:
        assert hip_images(file) == ("gfx942",)
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()


def test_bundles_packed_with_zstd_say_so_and_how_to_avoid_them() -> None:
    with pytest.raises(LoadError, match="zstd") as raised:
        hip_images(hip(packed(b"", method=1)))
    assert "--no-offload-compress" in raised.value.hint


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (b"__CLANG_OFFLOAD", "begins no offload bundle"),
        (b"__CLANG_OFFLOAD_BUNDLE__", "reach past the end"),
        (bundle("hip-amdgcn-amd-amdhsa--gfx906", entries=1 << 60), "no room for"),
        (bundle("hip-amdgcn-amd-amdhsa--gfx906", entries=3), "no target id"),
        (bundle("hip-amdgcn-amd-amdhsa--gfx906", size=1 << 40), "is not inside it"),
        (bundle("x" * 5000), "is not inside it"),
        (bundle("hip-amdgcn"), "no target id"),
        (bundle("hip-amdgcn-amd-amdhsa--gfx9\n06"), "no target id"),
        (packed(b"", version=7), "version 7"),
        (packed(b"", method=9), "method 9"),
        (packed(b"", size=1 << 40), "1099511627776 bytes"),
        (packed(b"", size=4), "4 bytes"),
        (packed(b""), "reach past the end"),
        (packed(b"something else, at length"), "unpacks to something else"),
        (packed(bundle("hip-amdgcn-amd-amdhsa--gfx906"), size=40), "reach past the end"),
        (packed(bundle())[:32] + b"\xff" * 200, "packed bundle: Error -3"),
    ],
)
def test_a_damaged_offload_bundle_is_a_load_error_that_says_where(section: bytes, why: str) -> None:
    with pytest.raises(LoadError) as raised:
        hip_images(library((".hip_fatbin", 1, section, 0), (".rest", 1, bytes(0), 0)))
    assert why in raised.value.why


def test_what_a_library_needs_is_read_without_what_is_weak() -> None:
    assert elf.read(dynamic()) == elf.Elf(
        "x86_64", "shared", ("libb.so", "liba.so"), ("A_1.0",), ("f",)
    )


@pytest.mark.parametrize(
    ("machine", "name"), [(62, "x86_64"), (183, "aarch64"), (243, "machine 243")]
)
def test_the_machine_has_the_name_that_the_kernel_gives_it(machine: int, name: str) -> None:
    assert elf.read(library((".text", 1, b"", 0), machine=machine, kind=1))[:2] == (name, "object")


def test_a_real_library_of_this_process_needs_what_is_mapped() -> None:
    found = elf.read(mapped_library())
    assert found.machine == os.uname().machine
    assert found.kind == "shared"
    assert any(name.startswith(("libc.", "libm.", "ld-linux")) for name in found.needed)


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
    with opened(path) as source:
        os.truncate(path, 100)
        with pytest.raises(LoadError, match="meanwhile"):
            source.read(64, 100, "a table")


@pytest.mark.parametrize("name", [".nv_fatbin", ".hip_fatbin", ".dynstr"])
def test_a_sparse_file_of_a_terabyte_takes_no_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    file = bytearray(dynamic())
    start = struct.unpack_from("<Q", file, 40)[0]
    index = [".dynstr", ".dynamic", ".dynsym", ".gnu.version_r", ".nv_fatbin", ".hip_fatbin"].index(
        name
    )
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
    with pytest.raises(LoadError, match="many times over"):
        images(file)


def test_names_that_lie_over_each_other_do_not_multiply() -> None:
    strings = b"\0" + b"x" * 100_000 + b"\0"
    symbols = b"".join(struct.pack("<IBBHQQ", n + 1, 0x12, 0, 0, 0, 0) for n in range(50_000))
    file = library((".dynstr", STRTAB, strings, 0), (".dynsym", DYNSYM, symbols, 1))
    with pytest.raises(LoadError, match="over each other"):
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
        if found.undefined and any(version.startswith("GLIBC_") for version in found.versions):
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
        if kind in {DYNAMIC, DYNSYM, VERNEED, STRTAB}:
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


@settings(max_examples=1500, deadline=None)
@given(changes=CHANGES, cut=SHARES)
def test_any_change_of_a_library_with_images_gives_a_result_or_a_load_error(
    changes: list[tuple[int, int, int]], cut: int
) -> None:
    file = mutated(MADE, MADE_PLACES, changes, cut)
    results = [stands(read, file) for read in (elf.read, images, relocatable_images, hip_images)]
    assert all(results) or file != MADE


@settings(max_examples=300, deadline=None)
@given(changes=CHANGES, cut=SHARES)
def test_any_change_of_a_real_library_gives_a_result_or_a_load_error(
    changes: list[tuple[int, int, int]], cut: int
) -> None:
    whole, places = real()
    file = mutated(whole, places, changes, cut)
    results = [stands(read, file) for read in (elf.read, images)]
    assert all(results) or file != whole


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_in_a_section_give_a_result_or_a_load_error(noise: bytes, led: bool) -> None:
    for name, read, lead in (
        (".nv_fatbin", images, container(size=len(noise))),
        (".hip_fatbin", hip_images, b"__CLANG_OFFLOAD_BUNDLE__"),
    ):
        section = (lead if led else b"") + noise
        assert stands(read, library((name, 1, section, 0))) or section.strip(b"\0")
