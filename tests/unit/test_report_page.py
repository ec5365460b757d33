"""The report's page in a real browser: every op is there, nothing is fetched or complained of."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
from sample import browser as chromium
from sample.browser import Browser
from test_report_forms import backend, filled, op

import opkiln
from opkiln.builder.registry import libraries
from opkiln.cli import main
from opkiln.report import page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOSTILE = '<img src="http://example.invalid/x.png" onerror="alert(1)">&amp;'
VOID = ("meta", "link", "br")


def thirty() -> str:
    """A page of thirty ops, with one that means no good."""
    ops = [op(f"op_{number}", backend("cpu"), backend("cuda", "would fail", "no GPU"))
           for number in range(29)]  # fmt: skip
    return page.render(filled((*ops, op(HOSTILE, backend("cpu", "would fail", HOSTILE)))))


# As text


class _Tags(HTMLParser):
    """Checks that tags close in the order they were opened, and notes what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_well_formed_and_refers_to_nothing() -> None:
    text = thirty()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.links == ["data:,"]
    assert not tags.tags & {"script", "img", "iframe", "object", "embed"}
    assert "url(" not in text
    assert "@import" not in text


def test_a_page_without_ops_or_environment_leaves_out_their_sections() -> None:
    report = filled()
    assert re.findall(r'<section id="(\w+)"', page.render(report)) == [
        "problems", "ops", "toolchain", "builds", "devices", "environment", "cache", "settings",
    ]  # fmt: skip
    only_ops = page.render(report._replace(environment=None, problems=()))
    assert re.findall(r'<section id="(\w+)"', only_ops) == ["ops"]
    assert 'id="ops"' not in page.render(report._replace(ops=None))


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium.program()
    if program is None:
        pytest.skip(chromium.MISSING)
    made = Browser(program, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


ROWS = """[...document.querySelectorAll("tr.op")].map(row => ({
    name: row.querySelector("th").firstChild.textContent.trim(),
    visible: row.checkVisibility() && row.getBoundingClientRect().height > 10}))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_every_op_of_this_machine_and_has_no_complaint(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    file = tmp_path / "report.html"
    assert main._run(["report", "--html", str(file)]) == 0
    browser.show(file.as_uri(), scheme)
    rows = browser.evaluate(ROWS)
    listed = [name for op, kind in opkiln.ALL_OPS.items() for name, _ in libraries(op, kind)]
    assert [row["name"] for row in rows] == listed
    assert all(row["visible"] for row in rows)
    assert browser.complaints() == []
    assert browser.requests() == [file.as_uri()]


def test_a_hostile_name_is_shown_as_it_is_and_does_nothing(
    browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    file.write_text(thirty(), encoding="utf-8")
    browser.show(file.as_uri(), "light")
    rows = browser.evaluate(ROWS)
    assert len(rows) == 30
    assert all(row["visible"] for row in rows)
    assert rows[-1]["name"] == HOSTILE
    assert browser.evaluate("document.images.length + document.scripts.length") == 0
    assert browser.complaints() == []
    assert browser.requests() == [file.as_uri()]


def test_light_and_dark_differ(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(thirty(), encoding="utf-8")
    found = {}
    for scheme in ("light", "dark"):
        browser.show(file.as_uri(), scheme)
        body = "getComputedStyle(document.body)"
        colours = browser.evaluate(f"[{body}.backgroundColor, {body}.color]")
        paper, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        found[scheme] = (paper > ink, browser.picture())
    assert found["light"][0]
    assert not found["dark"][0]
    assert found["light"][1] != found["dark"][1]


def test_a_trace_unfolds_without_a_script(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(thirty(), encoding="utf-8")
    browser.show(file.as_uri(), "light")
    shown = "document.querySelector('tr.op .trace').checkVisibility()"
    assert browser.evaluate(shown) is False
    browser.evaluate("document.querySelector('tr.op summary').click()")
    assert browser.evaluate(shown) is True
    assert "taken" in browser.evaluate("document.querySelector('tr.op .trace').innerText")


def test_a_narrow_window_has_nothing_that_stands_out(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(thirty(), encoding="utf-8")
    browser.show(file.as_uri(), "light", width=420)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 420
