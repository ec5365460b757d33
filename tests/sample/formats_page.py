"""The tables of docs/reference/formats.md."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "formats.md").read_text()


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found.group(1)


def table(title: str, after: str = "|") -> list[list[str]]:
    """The rows of the first table below a heading, after some text."""
    lines = section(title)[section(title).index(after) :].splitlines()
    while not lines[0].startswith("|"):
        del lines[0]
    rows = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows][2:]


def fields(title: str, after: str = "|") -> list[str]:
    return [name for row in table(title, after) for name in re.findall(r"`([^`]+)`", row[0])]


def fields_where(title: str, *kinds: str) -> set[str]:
    """The fields of a table whose column "Where" has one of these words."""
    rows = [row for row in table(title) if set(row[2].split(", ")) & set(kinds)]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
