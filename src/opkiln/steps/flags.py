"""Refuses flags from authors and variables that would bypass the plan."""

from __future__ import annotations

import re
from itertools import pairwise

from opkiln.errors import SpecError

# Prefixes of flags that make a compiler run other programs, load code, read its command line or a
# profile from a file that is in no key, stop early, or write an unexpected file. If a depfile is
# written elsewhere, the build seems to have no dependencies.
_REFUSED_FLAGS = (
    "@", "-wrapper", "--wrapper", "-specs", "--specs", "--config", "-fplugin", "-fpass-plugin",
    "-B", "--prefix", "-fuse-ld=/", "--ld-path", "-ccc-", "--gcc-toolchain", "-no-integrated-cpp",
    "-M", "--dependencies", "--write-", "--user-dependencies", "-o", "--output", "-###", "-E",
    "--preprocess", "-S", "--assemble", "-fsyntax-only", "-x", "--language", "-save-temps",
    "--save-temps", "-dump", "-fdump", "-aux-info", "-time=", "-fprofile-use", "-fauto-profile",
)  # fmt: skip
# The same for flags that are passed on to the preprocessor, the assembler or the linker.
_REFUSED_PARTS = (
    "@", "-plugin", "--plugin", "-load", "-add-plugin", "-o", "--output", "-M", "--M",
    "--out-implib", "--dependency-file", "-dependency-file",
)  # fmt: skip
_JOINED = ("-Wl,", "-Wa,", "-Wp,")
_HANDED_ON = (
    "-Xlinker", "-Xassembler", "-Xpreprocessor", "-Xclang", "--for-linker", "--for-assembler",
)  # fmt: skip
# The same for nvcc. Its flags also choose architectures, host compiler and threads, which the plan
# sets itself.
_REFUSED_BY_NVCC = frozenset((
    "-gencode", "--generate-code", "-arch", "--gpu-architecture", "-code", "--gpu-code", "-ccbin",
    "--compiler-bindir", "-optf", "--options-file", "-run", "--run", "-link", "--link", "-lib",
    "--lib", "-ptx", "--ptx", "-cubin", "--cubin", "-fatbin", "--fatbin", "-cuda", "--cuda",
    "-keep", "--keep", "-odir", "--output-directory", "-dryrun", "--dryrun", "-prec-dir",
    "-ldir", "-target-dir", "--target-directory", "-t", "--threads",
    "-objtemp", "--objdir-as-tempdir", "-dlink", "--device-link", "-optix-ir", "-ltoir", "-time",
    "--time", "-split-compile", "--split-compile", "--gpu-name",
))  # fmt: skip
# Flags whose value is a list, of flags for another program or of numbers.
_LISTS = (
    "-Xcompiler", "--compiler-options", "-Xptxas", "--ptxas-options", "-Xcudafe",
    "-diag-suppress", "--diag-suppress", "-diag-warn", "--diag-warn", "-diag-error", "--diag-error",
)  # fmt: skip
_NVCC_THREADS = re.compile(r"-t\d")
# Flags for relocatable device code: device code in one file calls device code in another. The
# objects need a device link.
_RELOCATABLE = (
    "-rdc=true", "--relocatable-device-code=true", "-dc", "--device-c",
)  # fmt: skip
_RELOCATABLE_IN_TWO = ("-rdc", "--relocatable-device-code")
_COMPILE_RELOCATABLE = ("-dc", "--device-c")  # they also mean -c, which the plan adds itself
# nvcc does not accept these together with -gencode.
_WHOLE_PROGRAM = (
    "-dlto", "-lto", "--dlink-time-opt", "-ewp", "--extensible-whole-program",
)  # fmt: skip

# Text without characters that are special to a shell or in nvcc's lists.
PLAIN = re.compile(r"[A-Za-z0-9_@%+=:./^-]*\Z")


def encodable(text: str) -> bool:
    """Whether a text can be an argument or a path: a lone surrogate that stands for no byte
    cannot."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def check(op: str, flags: tuple[str, ...], variable: str = "") -> None:
    """Refuse flags that a host compiler or linker must not get. Raises SpecError.

    ``variable`` is the variable that the flags come from; empty for the author's flags.
    """
    before = ""
    for flag in flags:
        if not flag or "\0" in flag or not encodable(flag):
            raise SpecError(f"op {op}: the flag {flag!r} is empty or cannot be passed to a program")
        option, _, value = flag.partition("=")
        if flag.startswith(_JOINED):
            refused = any(part.startswith(_REFUSED_PARTS) for part in flag.split(",")[1:])
        elif before in _HANDED_ON:
            refused = flag.startswith(_REFUSED_PARTS)
        elif option in _HANDED_ON:
            refused = value.startswith(_REFUSED_PARTS)
        else:
            refused = flag.startswith(_REFUSED_FLAGS)
        if refused:
            raise SpecError(
                f"op {op}: the flag {flag!r} is not allowed",
                why="it could start another program, redirect an output or read a file that is in "
                "no cache key",
                hint=f"unset {variable}" if variable else "",
            )
        before = flag


def check_nvcc(op: str, flags: tuple[str, ...], variable: str = "") -> None:
    """Refuse flags that nvcc must not get. Raises SpecError."""
    before = ""
    for flag in flags:
        option, _, value = flag.partition("=")
        joined = option in _LISTS and value
        parts = (value if joined else flag).split(",") if joined or before in _LISTS else [flag]
        named = {part.partition("=")[0] for part in (flag, *parts)}
        if named & _REFUSED_BY_NVCC or _NVCC_THREADS.match(flag):
            raise SpecError(
                f"op {op}: the nvcc flag {flag!r} is not allowed",
                why="the plan chooses architectures, host compiler, threads and outputs",
                hint=f"unset {variable}"
                if variable
                else "TORCH_CUDA_ARCH_LIST chooses architectures, NVCC_CCBIN the host compiler, "
                "NVCC_THREADS the threads",
            )
        for part in parts:
            if not PLAIN.match(part):
                raise SpecError(
                    f"op {op}: the nvcc flag {flag!r} is not allowed",
                    why="nvcc passes its flags to a shell, which would interpret one of its "
                    "characters",
                    hint=f"unset {variable}" if variable else "",
                )
        if flag in _WHOLE_PROGRAM:
            raise SpecError(
                f"op {op}: the nvcc flag {flag!r} is not allowed",
                why="nvcc does not accept a list of architectures together with it",
                hint="-rdc=true links device code of several files",
            )
        check(op, tuple(parts), variable)
        before = flag


def is_relocatable(flags: tuple[str, ...]) -> bool:
    """Whether nvcc flags ask for relocatable device code. If there are several, the last counts."""
    asked = False
    for flag, following in pairwise((*flags, "")):
        if flag in _RELOCATABLE:
            asked = True
        elif flag in _RELOCATABLE_IN_TWO:
            asked = following == "true"
        elif flag.partition("=")[0] in _RELOCATABLE_IN_TWO:
            asked = False
    return asked


def without_relocatable(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags without those for relocatable device code. The plan adds its own, once."""
    kept: list[str] = []
    value = False
    for flag in flags:
        if value:
            value = False
        elif flag in _RELOCATABLE_IN_TWO:
            value = True
        elif flag.partition("=")[0] not in (*_RELOCATABLE_IN_TWO, *_COMPILE_RELOCATABLE):
            kept.append(flag)
    return tuple(kept)
