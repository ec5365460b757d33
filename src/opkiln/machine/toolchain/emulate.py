"""CUDA sources for the emulator: the one declaration that a C++ compiler cannot be made to read.

``extern __shared__ T name[];`` declares the dynamic shared memory of a block. C++ would look for a
variable of that name. In a copy of the sources it is the emulator's macro instead, in the same
line. Everything else of CUDA's language is macros and functions (csrc/opkiln/emulator).
"""

from __future__ import annotations

import os
import re

from opkiln.base.model import EMULATOR_RUNTIME, OpSpec
from opkiln.errors import SpecError
from opkiln.machine.toolchain.staged_copy import Copy, Staged

_DYNAMIC = re.compile(
    rb"\bextern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^()]*\)\s*)?"
    rb"((?:[A-Za-z_][\w:]*(?:\s*<[^;<>]*>)?\s+)+)(\w+)\s*\[\s*\]\s*;"
)
_ALIGNED_LATER = re.compile(
    rb"\bextern\s+__shared__\s+([\w:]+(?:\s+[\w:]+)*)\s+"
    rb"(?:__align__|alignas)\s*\([^()]*\)\s*(\w+)\s*\[\s*\]\s*;"
)
_EXTERN = re.compile(rb"\bextern\s+__shared__\b[^;\n]*")
_CHEVRONS = re.compile(rb"<<<[^;]*>>>")
_COMMENT = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)


def stage(spec: OpSpec, directory: str) -> Staged | None:
    """A translated copy of the sources; None if nothing in them needs a translation.

    ``directory`` exists and is empty. Raises SpecError for a source that is missing or that the
    emulator cannot run, OSError.
    """
    authors = tuple(source for source in spec.sources if source != EMULATOR_RUNTIME)
    copy = Copy(spec._replace(sources=authors), directory)
    texts = {
        path: translate(text, spec.name, os.path.basename(path))
        for path, text in sorted(copy.contents.items())
    }
    if texts == copy.contents:
        return None
    copy.contents = texts
    return copy.write()


def translate(text: bytes, op: str, name: str) -> bytes:
    """A file as the emulator compiles it, with the same lines. Raises SpecError."""
    if _CHEVRONS.search(_blank_comments(text)):
        raise SpecError(
            f"op {op}: {name} launches a kernel by <<< >>>",
            why="only nvcc reads this; the emulator compiles kernels with the C++ compiler",
            hint="opk::launch(kernel, grid, block, shared_bytes, arguments...)    // of op.h",
        )
    made = text
    for pattern in (_DYNAMIC, _ALIGNED_LATER):
        made = pattern.sub(_declare, made)
    if left := _EXTERN.search(_blank_comments(made)):
        shown = left[0].decode("utf-8", "replace").strip()
        raise SpecError(
            f"op {op}: the emulator does not understand {shown!r} in {name}",
            why="dynamic shared memory is declared as an array without a length",
            hint="extern __shared__ float values[];",
        )
    return made


def _declare(found: re.Match[bytes]) -> bytes:
    kind, name = found[1].strip(), found[2]
    lines = found[0].count(b"\n")
    return b"OPKILN_DYNAMIC_SHARED(%s, %s);%s" % (name, b" ".join(kind.split()), b"\n" * lines)


def _blank_comments(text: bytes) -> bytes:
    return _COMMENT.sub(lambda comment: re.sub(rb"[^\n]", b" ", comment[0]), text)
