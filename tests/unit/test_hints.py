"""Hints: a command to copy is one, and the paths in it are quoted."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from opkiln.errors import StoreError
from opkiln.report.doctor.terms import PROGRAMS, copyable_command
from opkiln.store import archive

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "src" / "opkiln"

# Words in the expressions that give paths. What users and authors name can have any character.
PATHS = re.compile(r"\b(\w+_)?(path|file|dir|directory|parent|script|root|folder|leaf)s?(_\w+)?\b")
BEGINNING = re.compile(f"[\"'](?:{'|'.join(map(re.escape, PROGRAMS))}) ")
QUOTED = re.compile(r"\b(shlex\.)?(quote|join)\(.*\)\Z")


@functools.cache
def nodes(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


def commands(code: str) -> Iterator[ast.JoinedStr]:
    """The commands with something filled in: texts that begin with a program's name."""
    if not BEGINNING.search(code):
        return
    for node in nodes(code):
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            first, space, _ = str(node.values[0].value).partition(" ")
            if space and first in PROGRAMS:
                yield node


def unquoted(code: str) -> list[str]:
    """The paths that commands have without quotes."""
    found = []
    for command in commands(code):
        text = ""
        for part in command.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            shown = ast.unparse(part.value)
            # After four spaces there is a remark, which nobody copies.
            if "    " not in text and not QUOTED.match(shown) and PATHS.search(shown):
                found.append(f"{text}{{{shown}}}")
    return found


def sources() -> dict[str, str]:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100, "the sources are not where this test looks for them"
    return {str(path.relative_to(SOURCE)): path.read_text() for path in files}


def test_every_path_in_a_command_is_quoted() -> None:
    texts = {path: text for path, text in sources().items() if any(commands(text))}
    found = {path: unquoted(text) for path, text in texts.items()}
    assert {path: names for path, names in found.items() if names} == {}
    assert sum(len(list(commands(text))) for text in texts.values()) > 20


@pytest.mark.parametrize("code", ["f'ls -l {path}'", "f'mv {directory} {x}'",
                                  "f'python {script}    # {x}'"])  # fmt: skip
def test_a_path_without_quotes_would_be_found(code: str) -> None:
    assert len(unquoted(code)) == 1


@pytest.mark.parametrize("code", ["f'ls -l {shlex.quote(path)}'", "f'unset {origin}'",
                                  "f'opkiln cache gc    # {path}'"])  # fmt: skip
def test_a_quoted_path_is_not_found(code: str) -> None:
    assert unquoted(code) == []


def hints(code: str) -> Iterator[str]:
    """The hints that are given as plain text."""
    for node in nodes(code) if "hint=" in code else ():
        if isinstance(node, ast.keyword) and node.arg == "hint":
            for each in ast.walk(node.value):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value


# Words that a command never has but a sentence does.
SENTENCE = re.compile(r"\b(which|the|its|them|that|instead)\b")


def test_no_sentence_is_taken_for_a_command() -> None:
    taken = {copyable_command(hint) for text in sources().values() for hint in hints(text)}
    assert len(taken) > 20
    assert [command for command in sorted(taken) if SENTENCE.search(command)] == []


def test_a_path_with_spaces_can_be_copied(tmp_path: Path) -> None:
    path = str(tmp_path / "a b; $(c)")
    with pytest.raises(StoreError) as caught, archive.Bundle(path, listed=True):
        pass
    assert shlex.split(copyable_command(caught.value.hint))[-1] == path
