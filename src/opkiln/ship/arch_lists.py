"""Arch lists in the files of a project: those that a build would refuse, with file and line.

Read are TOML (``pyproject.toml``, a matrix of ``opkiln build --targets``), YAML and files of
variables (``NAME=value``). A value with a ``$`` or braces is another program's to fill in, and is
left alone. Neither a toolkit nor a GPU is asked: ``native`` and ``all`` are right everywhere.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any, NamedTuple

from opkiln import settings
from opkiln.arch import cuda, hip
from opkiln.digest import read_file
from opkiln.errors import OpkilnError, UsageError
from opkiln.ship import selection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Finding(NamedTuple):
    """A list that means nothing. ``name`` is its variable or key."""

    file: str
    line: int
    name: str
    what: str
    why: str


class _Given(NamedTuple):
    """A value in a file."""

    name: str
    value: str
    line: int


def _check_cuda(text: str) -> None:
    some = cuda.parse("9.0")
    cuda.parse(text, native=some, listed=some)


def _check_rocm(text: str) -> None:
    hip.parse(text, native=hip.parse("gfx90a"))


def _check_targets(text: str) -> None:
    for each in filter(None, map(str.strip, text.split(";"))):
        selection.parse(each)


def _check_cpu(text: str) -> None:
    selection.parse(f"cpu:{text}")


def _checks() -> dict[str, Callable[[str], None]]:
    """What tries the value of each variable. Raises OpkilnError."""
    fields = {
        "cuda_arch_list": _check_cuda, "rocm_arch_list": _check_rocm,
        "build_targets": _check_targets, "cpu": _check_cpu,
    }  # fmt: skip
    return {
        name: fields[each.field]
        for each in settings.table()
        if each.field in fields
        for name in (each.variable, *each.aliases)
    }


_TARGETS = "targets"  # the key of a matrix
_CHECKS = {**_checks(), _TARGETS: selection.parse}
_NAMES = "|".join(sorted(_checks()))
_ASSIGNED = re.compile(rf"^\s*(?:-\s+|export\s+)?[\"']?({_NAMES})[\"']?\s*[:=]\s*(.*)$")
_PLACEHOLDER = re.compile(r"[${}]")


def check(file: str) -> list[Finding]:
    """What is wrong with the lists in a file, in its order. Raises UsageError for one that cannot
    be read."""
    try:
        text = read_file(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read", why=str(error)) from None
    try:
        given = _of_toml(text) if file.endswith(".toml") else _of_lines(text)
        found = [_judged(file, each) for each in given]
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        return [Finding(file, int(place[1]) if place else 1, "TOML", str(error), "")]
    return sorted({each for each in found if each is not None}, key=lambda each: each.line)


def _judged(file: str, given: _Given) -> Finding | None:
    if _PLACEHOLDER.search(given.value):
        return None
    try:
        _CHECKS[given.name](given.value)
    except OpkilnError as error:
        return Finding(file, given.line, given.name, error.what, error.why)
    return None


def _of_lines(text: str) -> Iterator[_Given]:
    for number, line in enumerate(text.splitlines(), 1):
        if (match := _ASSIGNED.match(line)) and (value := _unquoted(match[2])):
            yield _Given(match[1], value, number)


def _unquoted(text: str) -> str:
    """A value without its quotes and without a comment after it."""
    if text[:1] in ("'", '"'):
        return text[1:].partition(text[0])[0]
    return re.split(r"(?:^|\s)#", text, maxsplit=1)[0].strip()


def _of_toml(text: str) -> Iterator[_Given]:
    document = tomllib.loads(text)
    lines = text.splitlines()
    if isinstance(document.get(_TARGETS), list):
        for each in document[_TARGETS]:
            if isinstance(each, str):
                yield _Given(_TARGETS, each, _line_of(lines, each))
    for name, value in _assigned(document):
        yield _Given(name, value, _line_of(lines, value, name))


def _assigned(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(variable, value) wherever a document has them: as a key, or as a word ``NAME=value``."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _assigned(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _assigned(each)
    elif isinstance(value, str) and value:
        if key in _CHECKS and key != _TARGETS:
            yield key, value
        elif any(name in value for name in _CHECKS if name != _TARGETS):
            yield from _in_words(value)


def _in_words(text: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(text)
    except ValueError:
        return  # a text with a quote in it, and not a list of words
    for word in words:
        name, _, value = word.partition("=")
        if value and name in _CHECKS:
            yield name, value


def _line_of(lines: list[str], value: str, name: str = "") -> int:
    """The line with a value, and with its name if there is one."""
    for wanted in ((name, value), (value,), (name,)):
        for number, line in enumerate(lines, 1):
            if all(each in line for each in wanted):
                return number
    return 1
