"""Divides C++ and CUDA text into tokens: enough to find functions and their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# A newline after a backslash continues a line, also inside a comment and a directive.
_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r\f\v]+|\\\r?\n)
    | (?P<newline>\n)
    | (?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?\*/)
    | (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^\s()\\"]{0,16})\(.*?\)(?P=delimiter)")
    | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
    | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
    | (?P<name>[^\W\d]\w*)
    | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
    | (?P<mark_>::|->|<<<|>>>|\#\#|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(
    r"""\#(?:\\\r?\n|/\*.*?\*/|//(?:\\\r?\n|[^\n])*|"(?:\\.|[^"\\\n])*"|[^\n])*""", re.DOTALL
)
_BLANK = frozenset(("space", "newline", "comment", "directive", "system"))
# Line markers of a preprocessor: one with the flags 1 and 3 opens a header of the system. A marker
# with 3 alone is a macro of such a header.
_ENTERS = re.compile(r'\#[ ]\d+[ ]"(?:\\.|[^"\\\n])*"[ ]1[ ]3(?:[ ]4)?\n')
_LEAVES = re.compile(r'^\#[ ]\d+[ ]"(?:\\.|[^"\\\n])*"(?:[ ][124])*$', re.MULTILINE)
_OF_DEVICE_ALONE = re.compile(r"__global__|(?<!__host__ )__device__(?! __host__)|<<<")


class Token(NamedTuple):
    """One token and its place in the text."""

    kind: str  # space, newline, comment, directive, system, raw, string, char, name, number, mark
    text: str
    start: int
    end: int

    @property
    def blank(self) -> bool:
        """Whether the parser skips it: a space, a comment, a line of the preprocessor, a header of
        the system."""
        return self.kind in _BLANK


def divide(text: str) -> Iterator[Token]:
    """All tokens of a text. Joined, they are the text again. In preprocessed text, a header of the
    system is one token, unless it defines something for the device alone: they are most of the
    text."""
    at, fresh = 0, True  # fresh: nothing but blanks so far on this line
    while at < len(text):
        if fresh and text[at] == "#":
            end = _find_header_end(text, at)
            kind = "system" if end else "directive"
            found = _DIRECTIVE.match(text, at)
            end = end or (found.end() if found else at + 1)
        else:
            found = _TOKEN.match(text, at)
            assert found is not None  # the last part of the pattern matches any character
            kind, end = str(found.lastgroup).rstrip("_"), found.end()
        yield Token(kind, text[at:end], at, end)
        at = end
        fresh = kind in ("newline", "system") or (fresh and kind in ("space", "comment"))


def _find_header_end(text: str, at: int) -> int:
    """The end of the system's header that begins with a line marker; 0 if it must be divided."""
    if not (opened := _ENTERS.match(text, at)):
        return 0
    left = _LEAVES.search(text, opened.end())
    end = left.start() if left else len(text)
    whole = text.count("{", at, end) == text.count("}", at, end)
    return end if whole and not _OF_DEVICE_ALONE.search(text, at, end) else 0
