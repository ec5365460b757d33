"""CUDA sources as HIP, or for the emulator: a translated copy of an op's sources.

The author's files stay unchanged. The copy keeps the names and the lines of the original. So no
``#include`` has to change, and the compiler's line 40 is the author's line 40.

The translation to HIP is that of torch's own hipify, so code that works there works here. torch
itself renames the files that it translates, next to the source, and rewrites each ``#include``.

For the emulator, one declaration is translated, because no C++ compiler can be made to read it:
``extern __shared__ T name[];`` declares the dynamic shared memory of a block. C++ would look for a
variable of that name. In the copy it is the emulator's macro instead, in the same line. All else of
CUDA's language is macros and functions (csrc/opkiln/emulator).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from opkiln.base.build_model import TorchSDK
from opkiln.base.digest import key, read_file
from opkiln.base.model import EMULATOR_RUNTIME, OpSpec
from opkiln.errors import SpecError, ToolchainError
from opkiln.machine import facts

# `#include "x"`, `# include <x>`, `__has_include(<x>)`; and one that only the preprocessor can
# resolve.
_INCLUDE = re.compile(
    r"""(?:^[ \t]*\#[ \t]*include(?:_next)?|__has_include[ \t]*\()[ \t]*(["<])([^">\n]+)[">]""",
    re.MULTILINE,
)
_COMPUTED = re.compile(r"^[ \t]*\#[ \t]*include[ \t]+[A-Za-z_]", re.MULTILINE)
_HEADERS = (".h", ".hh", ".hpp", ".hxx", ".h++", ".cuh", ".inl", ".inc", ".ipp", ".tpp", ".def")

# Files by which include directories of torch, CUDA and ROCm are recognized.
_FOREIGN = ("torch/headeronly", "torch/extension.h", "hip/hip_runtime.h")
_CUDA = "cuda_runtime_api.h"


class Staged(NamedTuple):
    """The copy. An op is built from it as from its own root."""

    root: str  # replaces the spec's root: relative paths stay valid
    sources: dict[str, str]  # as the spec names it -> relative to root
    include_dirs: dict[str, str]  # as the spec names it -> absolute; CUDA's own left out
    origin: dict[str, str]  # a file of the copy -> the author's, both absolute
    digests: dict[str, str]  # an author's file -> sha256 of what was copied


class Copy:
    """The files of a copy before they are written: the sources and all that they may include.
    Raises SpecError for a missing source.

    ``directory`` exists and is empty. Files are copied into it by their absolute paths, as into
    another root directory, so that a path with ``..`` stays valid in the copy. Headers belong to
    the author if they are next to the file that includes them or in the spec's include directories,
    unless those are of torch, CUDA or ROCm; a directory that only a flag names is not searched. The
    source tree is only read.
    """

    def __init__(self, spec: OpSpec, directory: str) -> None:
        self._spec = spec
        self._directory = directory
        self._searched = [d for d in map(self._absolute, spec.include_dirs) if not _is_foreign(d)]
        self.contents: dict[str, bytes] = {}  # path of the original -> its text
        self._own: dict[str, list[str]] = {}  # path -> the author's files that it includes, by name
        self._origin: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        inline = dict(spec.inline)
        for source in spec.sources:
            path = self._absolute(source)
            if source in inline:
                # A build writes the text to a file, and depends on it as on any other source.
                self._keep(path, inline[source].encode("utf-8", "surrogateescape"))
            elif not self._add(path):
                raise SpecError(
                    f"op {spec.title}: the source {source} does not exist",
                    why=f"sources are looked for in {spec.root}",
                )
        self._add_includes()

    def place(self, path: str) -> str:
        """The path of a file or directory in the copy."""
        return os.path.join(self._directory, os.path.normpath(path).lstrip("/"))

    def own_includes(self) -> dict[str, list[str]]:
        """For each file of the copy, by relative path: the author's files that it includes."""
        return {
            os.path.relpath(self.place(path), self._directory): sorted(set(names))
            for path, names in sorted(self._own.items())
        }

    def _add_includes(self) -> None:
        """Follow all includes, also those in conditions that may be false."""
        waiting = list(self.contents)
        while waiting:
            kept = waiting.pop()
            path = self._origin[kept]
            text = self.contents[kept].decode("utf-8", "surrogateescape")
            names = self._own[kept] = []
            headers: list[str] = []
            for bracket, name in _INCLUDE.findall(text):
                found = [
                    each for each in self._list_candidates(path, bracket, name) if self._has(each)
                ]
                names += [name] if found else []
                headers += found
            if _COMPUTED.search(text):
                headers += self._every_header(path)
            waiting += [os.path.normpath(each) for each in headers if self._add(each)]

    def write(self) -> Staged:
        """Write the copy."""
        for directory in (self._spec.root, *self._searched):
            os.makedirs(self.place(directory), exist_ok=True)
        for path, content in sorted(self.contents.items()):
            place = self.place(path)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "wb") as file:
                file.write(content)
        root = self.place(self._spec.root)
        paths = {each: self.place(self._absolute(each)) for each in self._spec.sources}
        named = {each: self._absolute(each) for each in self._spec.include_dirs}
        return Staged(
            root=root,
            sources={each: os.path.relpath(path, root) for each, path in paths.items()},
            # CUDA's own headers are left out: HIP's headers define the same things.
            include_dirs={
                each: self.place(path) if path in self._searched else path
                for each, path in named.items()
                if not os.path.exists(os.path.join(path, _CUDA))
            },
            origin={self.place(path): read_from for path, read_from in self._origin.items()},
            digests=self._digests,
        )

    def _absolute(self, path: str) -> str:
        return os.path.join(self._spec.root, path)

    def _list_candidates(self, includer: str, bracket: str, name: str) -> Iterator[str]:
        """Every file that a name may refer to. Which one depends on the file being compiled."""
        if os.path.isabs(name):
            return
        if bracket == '"':
            yield os.path.join(os.path.dirname(includer), name)
        for directory in self._searched:
            yield os.path.join(directory, name)

    def _has(self, path: str) -> bool:
        return os.path.normpath(path) in self.contents or os.path.isfile(path)

    def _every_header(self, includer: str) -> Iterator[str]:
        for top in dict.fromkeys((os.path.dirname(includer), *self._searched)):
            for directory, below, names in os.walk(top):
                below.sort()
                yield from (
                    os.path.join(directory, n) for n in sorted(names) if n.endswith(_HEADERS)
                )

    def _add(self, path: str) -> bool:
        """Add a file to the copy; False if it is already there, or does not exist."""
        # The compiler will look for `a/../b`. In the original, `a` may be a symbolic link to
        # another place; in the copy it never is. So the file is read by its original path, and
        # copied to the normalized path.
        kept = os.path.normpath(path)
        if kept in self.contents or not os.path.isfile(path):
            return False
        self._keep(path, read_file(path))
        return True

    def _keep(self, path: str, content: bytes) -> None:
        kept = os.path.normpath(path)
        self.contents[kept] = content
        self._origin[kept] = path
        self._digests[path] = hashlib.sha256(content).hexdigest()


def _is_foreign(directory: str) -> bool:
    return any(os.path.exists(os.path.join(directory, mark)) for mark in (*_FOREIGN, _CUDA))


# HIP

_TRANSLATOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "translate_hip.py")


def stage_hip(spec: OpSpec, torch: TorchSDK, directory: str) -> Staged:
    """Copy an op's sources, and the headers that they may include, and translate the copy.
    ``directory`` exists and is empty; see ``Copy``. Files without CUDA are copied unchanged. Raises
    SpecError for a missing source, ToolchainError if torch's hipify cannot be used, OSError."""
    copy = Copy(spec, directory)
    staged = copy.write()
    _translate(torch, directory, copy.own_includes())
    return staged


def hipify_identity(torch: TorchSDK) -> str:
    """The identity of the translator, for a key. Raises ToolchainError if torch has no hipify."""
    files = (_TRANSLATOR, *hipify_modules(torch))
    for path in files:
        facts.note_file(path)
    return key("hipify", [facts.digest_of(path) for path in files])


def _translate(torch: TorchSDK, directory: str, files: dict[str, list[str]]) -> None:
    """Translate files in place, in a process that loads torch's hipify and no other part of it."""
    from opkiln.run.process import python, run

    own = hipify_modules(torch)
    listing = os.path.join(directory, "hipify.json")  # no file of the author is in `/`
    with open(listing, "w", encoding="ascii") as file:
        json.dump(files, file)
    argv = python(_TRANSLATOR, os.path.dirname(own[0]), listing, isolated=True)
    done = run(argv, cwd=directory, timeout=600)
    os.unlink(listing)
    if done.returncode != 0:
        raise ToolchainError(
            f"the hipify of torch {torch.version} cannot translate CUDA sources",
            why=done.output.strip(),
            hint="pip install --upgrade torch",
        )


def hipify_modules(torch: TorchSDK) -> list[str]:
    """torch's hipify, file by file, in the order of their names."""
    directory = os.path.join(torch.path, "utils", "hipify")
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".py"))
    except OSError as error:
        raise ToolchainError(
            f"torch {torch.version} has no hipify, which translates CUDA sources to HIP",
            why=f"{directory}: {error.strerror}",
            hint="pip install --force-reinstall torch",
        ) from None
    return [os.path.join(directory, name) for name in names]


# The emulator

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


def stage_emulated(spec: OpSpec, directory: str) -> Staged | None:
    """A translated copy of the sources; None if nothing in them needs a translation. ``directory``
    exists and is empty. Raises SpecError for a source that is missing or that the emulator cannot
    run, OSError."""
    authors = tuple(source for source in spec.sources if source != EMULATOR_RUNTIME)
    copy = Copy(spec._replace(sources=authors), directory)
    texts = {
        path: translate_emulated(text, spec.name, os.path.basename(path))
        for path, text in sorted(copy.contents.items())
    }
    if texts == copy.contents:
        return None
    copy.contents = texts
    return copy.write()


def translate_emulated(text: bytes, op: str, name: str) -> bytes:
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
