"""Compiles through a launcher: ccache, sccache, distcc, icecc.

A launcher may hand out an object without compiling anything, or have it compiled elsewhere. Then
the log of the step does not say what the object was made from. So the same command is first run by
the real compiler as a preprocessor, observed. That pass gives
- the inputs: every header, every name that was looked for in vain, the compiler itself;
- a digest of the text that is to be compiled, and of all files and programs that took part. ccache
  and sccache get it as part of their own cache keys. Alone, they would overlook a new header in
  front of another, or another compiler behind a script.

A preprocessor does not run the assembler. If the text has a directive that reads a file, the pass
is not enough, and the source is compiled without the launcher. (ccache does not cache such sources
either.)
"""

from __future__ import annotations

import os
import re

from opkiln.digest import key, sha256_file
from opkiln.observing.limits import LAUNCHERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from opkiln.build_model import Toolchain

# .incbin and .include in a string, and what could put them together: the assembler's macros. In the
# preprocessed text strings are not joined yet, so the word may begin one: asm("." "incbin ...").
_DIRECTIVE = re.compile(
    rb"\bincbin\b|\.\s*include\b|[\"(\s]include\b[^<\n]*\\\"|\.(macro|irpc?|altmacro)\b"
)
# Flags that have the compiler or the assembler read files, and the preprocessor not.
_FLAGS = (
    "-Wa,", "-Xassembler", "-fprofile", "-fauto-profile", "-fbranch-probabilities", "-fmodule",
    "-fprebuilt-module", "-fsanitize-", "-fno-sanitize-", "-fxray-", "-fthinlto-index",
)  # fmt: skip
# They have a launcher start the compiler, and do nothing else.
DIRECT = {"CCACHE_DISABLE": "1", "DISTCC_HOSTS": "localhost", "ICECC": "no"}


def can_preprocess(argv: tuple[str, ...], toolchain: Toolchain) -> bool:
    """Whether a pass of the preprocessor reads what this compile reads. nvcc's does not: it is for
    one architecture, and each of them, and the host, may include other headers."""
    return without(argv, toolchain)[0] == toolchain.cxx


def named(toolchain: Toolchain) -> bool:
    """Whether the host compiler runs through a launcher, as far as names tell."""
    masked = os.path.basename(os.path.realpath(toolchain.cxx)) in LAUNCHERS
    return masked or toolchain.launcher is not None


def without(argv: tuple[str, ...], toolchain: Toolchain) -> tuple[str, ...]:
    """The command without the launcher that the user named."""
    return argv[1:] if argv[0] == toolchain.launcher else argv


def preprocess(argv: tuple[str, ...], toolchain: Toolchain, output: str) -> tuple[str, ...]:
    """The command that has the real compiler preprocess what a compile step's command compiles."""
    source = argv[-3]  # -MD -MF DEPFILE -c SOURCE -o OBJECT
    # Without it, g++ does not look for precompiled headers.
    more = ("-fpch-preprocess",) if toolchain.family == "gcc" else ()
    return (*without(argv, toolchain)[:-7], *more, "-E", source, "-o", output)


def reads_more(text: bytes, argv: tuple[str, ...]) -> bool:
    """Whether the compile may read files that the preprocessor did not."""
    return _DIRECTIVE.search(text) is not None or any(each.startswith(_FLAGS) for each in argv)


def bound_to(text: bytes, files: Iterable[str]) -> dict[str, str]:
    """What makes ccache and sccache serve only objects that were made of this text, by the programs
    and scripts among these files. Raises OSError if one is gone."""
    bond = key("launched", (text, {sha256_file(path) for path in files}))
    return {"CCACHE_COMPILERCHECK": f"string:{bond}", "SCCACHE_C_CUSTOM_CACHE_BUSTER": bond}
