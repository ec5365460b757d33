"""Libraries with GPU images, made byte by byte: as compilers write them, and damaged ones."""

from __future__ import annotations

import struct
import zlib

from sample.levels import X86_64

PTX, CUBIN, LTO = 1, 2, 8
A, F = 1 << 20, 1 << 21
STRTAB, DYNAMIC, NOBITS, DYNSYM, VERNEED, VERSYM = 3, 6, 8, 11, 0x6FFFFFFE, 0x6FFFFFFF


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
    ids = [f"host-{X86_64}-unknown-linux".encode(), *(target.encode() for target in targets)]
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


def cuda(*containers: bytes) -> bytes:
    return library((".nv_fatbin", 1, b"".join(containers), 0))


def hip(*bundles: bytes) -> bytes:
    return library((".hip_fatbin", 1, b"".join(bundles), 0))


def dynamic(strings: bytes = b"\0liba.so\0libb.so\0A_1.0\0A_1.1\0f\0g\0") -> bytes:
    """A library that needs libb.so and liba.so (A_1.0; A_1.1 weakly), and its f; g is weak."""
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
        (".gnu.version", VERSYM, struct.pack("<5H", 0, 2, 3, 1, 0), 3),
    )  # fmt: skip
