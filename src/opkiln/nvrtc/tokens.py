"""Divides C++ and CUDA text into tokens: enough to find functions and their bodies."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# A newline after a backslash continues a line, also inside a comment and a directive.
_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r\f\v]+|\\\r?\n)
    | (?P<newline>\n)
    | (?P<comment>//(?:\\\r?\n|[^\n])*|/\*.*?\*/)
    | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^\s()\\"]{0,16})\(.*?\)(?P=mark)")
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
_BLANK = frozenset(("space", "newline", "comment", "directive"))


class Token:
    """One token and its place in the text."""

    __slots__ = ("end", "kind", "start", "text")

    def __init__(self, kind: str, text: str, start: int, end: int) -> None:
        self.kind = kind  # space, newline, comment, directive, raw, string, char, name, number, mark
        self.text = text
        self.start = start
        self.end = end

    def __repr__(self) -> str:
        return f"Token({self.kind}, {self.text!r}, {self.start})"

    @property
    def blank(self) -> bool:
        """Whether the parser passes it by: spaces, comments and lines of the preprocessor."""
        return self.kind in _BLANK


def divide(text: str) -> Iterator[Token]:
    """All tokens of a text. Joined, they are the text again."""
    at, fresh = 0, True  # fresh: nothing but blanks so far on this line
    while at < len(text):
        if fresh and text[at] == "#":
            found = _DIRECTIVE.match(text, at)
            kind = "directive"
        else:
            found = _TOKEN.match(text, at)
            assert found is not None  # the last part of the pattern matches any character
            kind = "mark" if found.lastgroup == "mark_" else str(found.lastgroup)
            kind = "raw" if kind == "mark" and found.group("raw") else kind
        assert found is not None
        yield Token(kind, found.group(), at, found.end())
        at = found.end()
        fresh = kind == "newline" or (fresh and kind in ("space", "comment"))
