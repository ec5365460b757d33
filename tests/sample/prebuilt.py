"""Layers of prebuilt ops, made by hand: no compiler, and libraries that need just what is said."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

from opkiln.base.digest import key
from opkiln.store import entry
from opkiln.store.key import deps_key
from sample.binaries import DYNAMIC, DYNSYM, STRTAB, VERNEED, VERSYM, library
from sample.levels import X86_64, X86_V3

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

X86, ARM = 62, 183
STABLE = "torch-stable-2.10"
FULL = "torch-2.13.0+cpu-0123456789abcdef-cxx11-cpython-311-3.11.7"
SYSTEM = (
    ("libc.so.6", "memcpy", "GLIBC_2.14"),
    ("libstdc++.so.6", "_Znwm", "GLIBCXX_3.4"),
    ("libgcc_s.so.1", "_Unwind_Resume", "GCC_3.0"),
)
TORCH = (("", "aoti_torch_abi_version", ""), ("", "torch_library_impl", ""))


def linked(
    *symbols: tuple[str, str, str],
    needed: Sequence[str] = ("libtorch_cpu.so",),
    defined: Sequence[str] = (),
    machine: int = X86,
    content: bytes = b"\xc3",
) -> bytes:
    """A shared library that uses these symbols, (soname, name, version), and has ``defined``."""
    sonames = list(dict.fromkeys([*needed, *(soname for soname, _, _ in symbols if soname)]))
    versions = sorted({(soname, version) for soname, _, version in symbols if soname})
    words = [*sonames, *defined]
    words += [word for symbol in symbols for word in symbol if word]
    strings = b"\0" + b"\0".join(word.encode() for word in dict.fromkeys(words)) + b"\0"

    def at(word: str) -> int:
        return strings.index(b"\0" + word.encode() + b"\0") + 1

    tags = b"".join(struct.pack("<qQ", 1, at(name)) for name in sonames) + bytes(16)
    table, numbers = bytes(24), [0]
    for soname, name, version in symbols:
        table += struct.pack("<IBBHQQ", at(name), 0x12, 0, 0, 0, 0)
        numbers.append(versions.index((soname, version)) + 2 if soname else 1)
    for name in defined:
        table += struct.pack("<IBBHQQ", at(name), 0x12, 0, 1, 0, 0)
        numbers.append(1)
    needs = b""
    for index, (soname, version) in enumerate(versions):
        following = 32 if index + 1 < len(versions) else 0
        needs += struct.pack("<HHIII", 1, 1, at(soname), 16, following)
        needs += struct.pack("<IHHII", 0, 0, index + 2, at(version), 0)
    return library(
        (".dynstr", STRTAB, strings, 0),
        (".dynamic", DYNAMIC, tags, 1),
        (".dynsym", DYNSYM, table, 1),
        (".gnu.version_r", VERNEED, needs, 1),
        (".gnu.version", VERSYM, struct.pack(f"<{len(numbers)}H", *numbers), 3),
        (".text", 1, content, 0),
        machine=machine,
    )


def target(**changes: Any) -> dict[str, Any]:
    """A target as a manifest has it."""
    plain = {
        "abi_tag": STABLE, "archs": [], "backend": "cpu", "cpu": X86_V3, "cpu_features": [],
        "debug": False, "flags": [], "machine": X86_64, "system": "linux",
    }  # fmt: skip
    return {**plain, **changes}


def add(
    layer: Path,
    op: str,
    payload: bytes | None = None,
    *,
    distribution: str = "demo",
    kind: str = "library",
    inputs: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Put an entry into a layer, as a store would hold it; ``changes`` are of its target."""
    payload = linked(*SYSTEM, *TORCH) if payload is None else payload
    made_for = target(**changes)
    source = ["src", f"{op}.cpp", hashlib.sha256(op.encode()).hexdigest()]
    deps = {"own": [source], "others": ""}
    names = (
        key("intent", (op, sorted((name, str(value)) for name, value in made_for.items()))),
        key("build", op),
        deps_key(deps),
    )
    leaf = layer.joinpath("v1", "ops", distribution, op, *names)
    leaf.mkdir(parents=True)
    manifest = {
        "schema": entry.SCHEMA, "kind": kind, "op": op, "distribution": distribution,
        "target": made_for, "payload": f"{op}.so", "size": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(), "deps": deps,
    }  # fmt: skip
    lists = {"schema": entry.SCHEMA, "inputs": made_with() if inputs is None else inputs}
    (leaf / f"{op}.so").write_bytes(payload)
    (leaf / entry.MANIFEST).write_bytes(entry.write_manifest(manifest))
    (leaf / entry.SIDECAR).write_bytes(entry.write_manifest(lists))
    return leaf


def made_with(*linked_to: str, **compilers: str) -> dict[str, Any]:
    """What a sidecar says of a build: its compilers by family, the link's last arguments."""
    known = compilers or {"gcc": "g++ 12.2.0"}
    return {
        "toolchain": {
            family: {"version": version, "identity": key("identity", version)}
            for family, version in known.items()
        },
        "steps": [["g++", "-c", "op.cpp"], ["g++", "-shared", "op.o", *linked_to]],
    }
