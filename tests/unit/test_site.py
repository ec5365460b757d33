"""The documentation site as it is written: its navigation, its links, its pictures.

``make docs`` builds it and opens it in a browser; this needs neither.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs" / "site"), str(ROOT / "bench")]

import diagrams  # noqa: E402 (found by the line above)
import pages  # noqa: E402
import terminal  # noqa: E402
import timeline  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
SOURCES = {**pages.sources(), "README.md": ROOT / "README.md"}


def test_the_navigation_names_every_page_once() -> None:
    named = Counter(pages.navigation())
    assert sorted(named) == sorted(pages.sources())
    assert max(named.values()) == 1, named


def test_the_navigation_has_four_parts_and_the_landing_page() -> None:
    expected = ["opkiln", "Tutorials", "How-to", "Explanation", "Reference"]
    assert pages.parts() == expected
    assert pages.navigation()[0] == "index.md"


@pytest.mark.parametrize("page", SOURCES)
def test_a_pages_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    source = SOURCES[page]
    text = source.read_text()
    for link in pages.links(text):
        target = Path(os.path.normpath(source.parent / link.path)) if link.path else source
        assert target.exists(), f"{page} links to {link.path}, which does not exist"
        assert target.is_relative_to(ROOT), f"{page} links to {link.path}, outside the repository"
        if link.anchor:
            headings = pages.anchors(target.read_text())
            assert link.anchor in headings, f"{page} links to {link.path}#{link.anchor}"


@pytest.mark.parametrize("page", SOURCES)
def test_a_page_has_one_title_which_comes_first(page: str) -> None:
    text = pages._without_code(SOURCES[page].read_text())
    titles = re.findall(r"^# .*", text, re.MULTILINE)
    assert len(titles) == 1, titles
    assert text.lstrip().startswith(titles[0])


def test_links_in_code_are_not_links_and_headings_are_named_as_code_hosts_name_them() -> None:
    text = (
        "# A *title*\n\n`[x](none.md)` [a](b.md#c) [`d`](#what-ensure-does-and-why)\n\n"
        "```text\n[y](none.md)\n# no heading\n```\n\n## What `ensure` does, and why\n"
        "[site](https://example.org/#x)\n"
    )
    found = [(link.path, link.anchor, text[link.start : link.end]) for link in pages.links(text)]
    assert found == [
        ("b.md", "c", "b.md#c"),
        ("", "what-ensure-does-and-why", "#what-ensure-does-and-why"),
    ]
    assert pages.anchors(text) == {"a-title", "what-ensure-does-and-why"}


# Pictures


@pytest.mark.parametrize("name", diagrams.PICTURES_OF)
def test_a_diagram_is_what_its_script_draws(name: str) -> None:
    assert (PICTURES / name).read_text() == diagrams.PICTURES_OF[name](), "run `make docs`"


def test_the_recorded_terminal_is_what_its_recording_gives() -> None:
    cast = [json.loads(line) for line in terminal.CAST.read_text().splitlines()]
    assert terminal.PICTURE.read_text() == terminal.draw(cast), "run docs/site/terminal.py"
    typed = [
        line.text.partition(" ")[2]
        for line in terminal.lines(cast)
        if line.text.startswith(terminal.PROMPT)
    ]
    assert typed == list(terminal.COMMANDS), "record it again"


def test_the_recorded_terminal_is_never_an_empty_box() -> None:
    """Its command is there from the first moment, and what it prints follows within a second."""
    picture = terminal.PICTURE.read_text()
    (command,) = re.findall(rf"<text[^>]*>.*{terminal.COMMANDS[0]}</text>", picture)
    assert "animation" not in command
    (whole,) = re.findall(r"animation-duration: ([\d.]+)s", picture)
    hidden = re.findall(r"@keyframes l\d+ \{ 0%, ([\d.]+)%", picture)
    assert float(hidden[0]) / 100 * float(whole) < 1


def test_the_timeline_is_what_its_trace_gives() -> None:
    document = json.loads(timeline.RESULTS.read_text())
    assert timeline.TARGET.read_text() == timeline.draw(document), "run bench/timeline.py"
    steps = timeline.steps(document["trace"])
    assert any(a.lane != b.lane and a.start < b.end and b.start < a.end
               for a in steps for b in steps), "steps ran side by side"  # fmt: skip


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda each: each.name)
def test_a_picture_is_well_formed_reads_in_the_dark_and_says_what_it_shows(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.get("role") == "img"
    assert root.get("aria-label")
    text = picture.read_text()
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "it fetches something"
