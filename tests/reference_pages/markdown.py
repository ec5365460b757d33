"""Docstrings as Markdown that reads the same on a code host and on a site made by MkDocs."""

from __future__ import annotations

import re

from opkiln import errors

_PAGE = re.compile(r"`{0,2}\bdocs/([\w-]+)\.md`{0,2}")
_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_DUNDER = re.compile(r"\b__\w+__(?:\.py)?")
_ERRORS = (
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
)
_ERROR = re.compile(rf"\b(?:{'|'.join(_ERRORS)})\b")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")


def anchor(heading: str) -> str:
    """The anchor of a heading: GitHub and MkDocs make the same of letters, digits, _ and -."""
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


def code(text: str, language: str = "python") -> str:
    """A block of code."""
    return f"```{language}\n{text}\n```"


def cell(text: str) -> str:
    """Text for one cell of a table. A code host splits cells at a bar, also inside code."""
    return " ".join(text.split()).replace("|", "\\|")


def first_sentence(doc: str) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    found = re.match(r"(.+?\.)(?= [A-Z`(]|$)", paragraph)
    text = found.group(1) if found else paragraph.removesuffix(":")
    # A code span that the sentence ends in is cut.
    return prose(text if text.count("`") % 2 == 0 else paragraph)


def prose(doc: str) -> str:
    """A docstring as Markdown. Its code is marked already: by backticks, or by four blanks."""
    parts = doc.split("\n\n")
    return "\n\n".join(part if part.startswith("    ") else _text(part) for part in parts)


def _text(paragraph: str) -> str:
    """Names of pages and of errors are links, and a list is a paragraph of its own."""
    parts = _CODE.split(_PAGE.sub(r"[docs/\1.md](../\1.md)", paragraph))
    parts[::2] = map(_plain, parts[::2])
    lines: list[str] = []
    for line in "".join(parts).splitlines():
        if lines and _ITEM.match(line) and not any(map(_ITEM.match, lines)):
            lines.append("")  # MkDocs sees no list in the middle of a paragraph
        lines.append(line)
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text without code. Angle brackets and ``__names__`` mean nothing there."""
    text = _DUNDER.sub(r"`\g<0>`", text.replace("<", "&lt;"))
    return _ERROR.sub(lambda found: f"[{found[0]}](errors.md#{anchor(found[0])})", text)
