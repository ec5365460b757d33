"""Reads the text of a command as build files have it: which tools it starts, and what they write.

Only texts of a simple form are read: commands joined by ``&&``, without variables, redirections and
patterns, each a compiler, a linker, an archiver, or one of the few others that stand beside these
in build files (``cd``, ``:``, ``rm -f`` of what is about to be written).
"""

from __future__ import annotations

import os
import re
import shlex
from itertools import pairwise
from typing import NamedTuple

from opkiln.building.observing import limits
from opkiln.machine.toolchain.find import LAUNCHERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PART = r"""[^\s'"\\$`*?\[&;|<>()]|\\[^\n]|'[^']*'|"(?:[^"\\$`]|\\.)*\""""
_TOKEN = re.compile(rf"[ \t]*(?:(?P<and>&&)|(?P<word>(?:{_PART})+))", re.DOTALL)
_ARCHIVER = re.compile(r"(.*-)?(ar|ranlib)([-.][\d.]+)?\Z")
_LINKER = re.compile(
    r"(.*-)?(ld(\.\w+)?|lld|mold|nvlink|fatbinary|ptxas|gfortran|flang)([-.][\d.]+)?\Z"
)
_SOURCE = re.compile(r".*\.(c|cc|cpp|cxx|C|cu|m|mm|f90|F90|s|S|hip|ii?)\Z")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_REMOVES = {"rm": ["-f"], "cmake": ["-E", "rm", "-f"]}
_DEPFILES = ("-MF", "--dependency-output", "-dependency-output", "-MF=")


class ShellText(NamedTuple):
    """What a text does, as far as it says so."""

    text: str  # without the names of launchers: the compiler itself is observed
    programs: tuple[str, ...]
    outputs: tuple[str, ...]  # as they are spelled
    words: tuple[str, ...]
    label: str  # its source or its output, for people


def read(text: str) -> ShellText | None:
    """The tools in a command's text; None if it does, or may do, something else."""
    found = _split(text)
    if found is None:
        return None
    launchers: list[tuple[int, int]] = []
    programs: list[str] = []
    outputs: list[str] = []
    removed: list[str] = []
    place = ""
    for command in found:
        words = [word for word, _, _ in command]
        while words and _ASSIGNMENT.match(words[0]):
            del words[0]
        while words and os.path.basename(words[0]) in LAUNCHERS:
            launchers.append(command[len(command) - len(words)][1:])
            del words[0]
        if not words:
            return None
        name, rest = os.path.basename(words[0]), words[1:]
        if words in ([":"], ["true"]):
            continue
        if words[0] == "cd" and len(words) == 2 and not place:
            place = words[1]
        elif rest[: len(after := _REMOVES.get(name, [""]))] == after:
            removed += rest[len(after) :]
        elif (wrote := _outputs(name, rest)) is not None:
            programs.append(words[0])
            outputs += (os.path.join(place, each) for each in wrote)
        else:
            return None
    if not outputs or not {os.path.join(place, each) for each in removed} <= set(outputs):
        return None
    for first, last in reversed(launchers):
        text = text[:first] + text[last:].lstrip()
    every = tuple(word for command in found for word, _, _ in command)
    source = next((word for word in every if _SOURCE.match(word)), outputs[0])
    return ShellText(
        text, tuple(programs), tuple(dict.fromkeys(outputs)), every, os.path.basename(source)
    )


def _split(text: str) -> list[list[tuple[str, int, int]]] | None:
    """The words of each command, with their places in the text."""
    commands: list[list[tuple[str, int, int]]] = [[]]
    place, end = 0, len(text.rstrip(" \t"))
    while place < end:
        token = _TOKEN.match(text, place)
        if token is None:
            return None
        place = token.end()
        if token["and"]:
            commands.append([])
            continue
        word = token["word"]
        if word[0] in "~#" or word in ("{", "}", "!"):
            return None
        if any(mark in word for mark in "'\"\\"):
            try:
                word = shlex.split(word)[0]
            except (ValueError, IndexError):
                return None
        commands[-1].append((word, *token.span("word")))
    return commands if all(commands) else None


def _outputs(name: str, words: list[str]) -> list[str] | None:
    """What a tool of this name writes, as its arguments say; None if it is no tool that is known,
    or they do not say."""
    if _ARCHIVER.match(name):
        if "ranlib" in name:
            return [words[-1]] if words else None
        flags = words[0].lstrip("-") if words else ""
        creates = {*flags} & {*"qr"} and not {*flags} & {*"abdimptx"}
        return [words[1]] if creates and len(words) > 2 else None
    if not (_LINKER.match(name) or limits.is_compiler(name)):
        return None
    if any(word in ("-", "/dev/stdin") for word in words) or _for_this_gpu(words):
        return None
    return list(_named(words)) or None


def _named(words: list[str]) -> Iterator[str]:
    wrote = False
    for word, following in pairwise((*words, "")):
        if word in ("-o", "--output-file") and following:
            wrote = True
            yield following
        elif word.startswith("-o") and re.match(r"-o[./\w][^=]*\.\w+\Z", word):
            wrote = True
            yield word[2:]
        elif word in _DEPFILES and following and wrote | ("-o" in words):
            yield following


def _for_this_gpu(words: list[str]) -> bool:
    """Whether nvcc asks the driver for the GPUs that are here."""
    return any(re.search(r"(arch|code|gencode)(=|\Z).*\bnative", word) for word in words)


def is_for_this_cpu(words: tuple[str, ...]) -> bool:
    """Whether the result depends on the CPU that is here."""
    return any(re.search(r"-m(arch|cpu|tune)=native", word) for word in words)


def hides_paths(words: tuple[str, ...]) -> bool:
    """Whether paths may be in an output in a form that is not seen: compressed."""
    return any(map(_COMPRESSED.match, words))


_COMPRESSED = re.compile(
    r"-gz|-flto|--compress-debug|-W[al],.*compress|-G\Z|--?(device-debug|generate-line-info|lineinfo)"
)


def has_device_code(words: tuple[str, ...]) -> bool:
    """Whether an output has device code, which nvcc compresses."""
    return any(word.endswith((".cu", ".ptx", ".cubin")) for word in words)
