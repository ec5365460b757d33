"""The pages of the documentation as they are written: navigation, headings and links.

The site's build and the tests read them here. It needs the standard library alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIGURATION = ROOT / "zensical.toml"

_FENCE = re.compile(r"^[ ]*(```+|~~~+)[^\n]*\n.*?^[ ]*\1[ ]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6}[ ]+(.+?)[ ]*#*$", re.MULTILINE)
_MARKUP = re.compile(r"\[([^\]]*)\]\([^)]*\)|[`*]")


class Link(NamedTuple):
    """A link to another page, to a file or within a page, and where it is in the text."""

    path: str  # relative to the page; empty for a link within it
    anchor: str
    start: int
    end: int


def sources() -> dict[str, Path]:
    """Every page of the site, by its path within the site: those of docs/, and files elsewhere
    that the configuration lists (the changelog, say)."""
    found = {str(page.relative_to(DOCS)): page for page in sorted(DOCS.rglob("*.md"))}
    elsewhere = _project()["extra"]["pages_elsewhere"]
    return {**found, **{page: ROOT / source for page, source in elsewhere.items()}}


def navigation() -> list[str]:
    """The pages that the navigation names, in its order, each as often as it is named."""
    return list(_leaves(_project()["nav"]))


def parts() -> list[str]:
    """The top level of the navigation."""
    return [next(iter(entry)) for entry in _project()["nav"]]


def _project() -> dict[str, Any]:
    return dict(tomllib.loads(CONFIGURATION.read_text())["project"])


def _leaves(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for below in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(below, str):
                yield below
            else:
                yield from _leaves(below)


def links(text: str) -> list[Link]:
    """The links of a page, but for those to other sites. Code has none."""
    found = []
    for match in _LINK.finditer(_without_code(text)):
        path, _, anchor = match[1].partition("#")
        if ":" not in path:
            found.append(Link(path, anchor, match.start(1), match.end(1)))
    return found


def anchors(text: str) -> set[str]:
    """What a link to this page can name: the headings, by the rule that code hosts have, too."""
    headings = _HEADING.findall(_blank(_COMMENT, _blank(_FENCE, text)))
    return {_slug(heading) for heading in headings}


def _slug(heading: str) -> str:
    plain = _MARKUP.sub(lambda match: match[1] or "", heading)
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def _without_code(text: str) -> str:
    for pattern in (_COMMENT, _FENCE, _CODE):
        text = _blank(pattern, text)
    return text


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """The text without what the pattern matches; all else stays at its position."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
