"""``make docs``: checks the site that docs/site/build.py built.

    .docs-venv/bin/python tests/site/run.py                          # build/site
    .docs-venv/bin/python tests/site/run.py --screenshots /tmp/shots

Every link and anchor within the site must lead somewhere. Then a headless Chromium opens each page
from a web server, as wide as a desktop and a phone, in light and dark: nothing may complain, ask
another host or be wider than the window. Last, it searches. Without Chromium that part is skipped,
and the output says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from sample import browser as chromium  # noqa: E402 (found by the line above)

SITE = HERE.parents[1] / "build" / "site"
BASE = "http://site.invalid/"  # links are resolved as a browser does, below any address
WIDTHS = {"desktop": 1280, "phone": 390}
SCHEMES = ("light", "dark")
PICTURED = ("index.html", "tutorials/write-an-op/index.html")
# What somebody may look for, and the page that must be among the first results.
SEARCHES = {
    "arch list": "devices/", "kill -9": "reliability/", "OPKILN_MODE": "using/",
    "passed on to compilers": "variables/",
}  # fmt: skip


class Page(HTMLParser):
    """The links of a page, and what links to it can name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "name" in values:
            self.anchors.add(values["name"])
        names = ("href", "src") if tag != "link" or values.get("rel") != "canonical" else ()
        self.links += [values[name] for name in names if name in values]


class Links(NamedTuple):
    """How many links were checked, and what is wrong with them."""

    inside: int
    anchors: int
    outside: int
    wrong: list[str]


def address(file: Path) -> str:
    """The path of a page within the site, as links have it: a directory instead of its index."""
    path = file.relative_to(SITE).as_posix()
    return path.removesuffix("index.html")


def check_links(files: list[Path]) -> Links:
    """Follow every link of every page."""
    found = {address(file): Page(file.read_text(encoding="utf-8")) for file in files}
    inside = anchors = outside = 0
    wrong = []
    for path, page in found.items():
        for link in page.links:
            goal = urlsplit(urljoin(BASE + path, link))
            if goal.scheme not in ("http", "https") or goal.netloc != urlsplit(BASE).netloc:
                outside += 1
                continue
            inside += 1
            place = unquote(goal.path).lstrip("/")
            target = found.get(place.removesuffix("index.html"))
            if target is None and not (SITE / place).is_file():
                wrong.append(f"{path or '/'}: {link} leads nowhere")
            elif target is not None and goal.fragment:
                anchors += 1
                if unquote(goal.fragment) not in target.anchors:
                    wrong.append(f"{path or '/'}: {link} names no heading of {place or '/'}")
    return Links(inside, anchors, outside, wrong)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The site on a web server of this machine; its address."""
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


# Scripts of the page run after it is loaded: two frames, and what they started.
SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
TOO_WIDE = """(() => {
    const root = document.documentElement, room = root.clientWidth;
    if (root.scrollWidth <= room) return "";
    const wide = [...document.querySelectorAll("article *")].find(
        each => each.getBoundingClientRect().right > room + 1);
    return `${root.scrollWidth} pixels wide in ${room}: ${wide ? wide.outerHTML.slice(0, 80) : ""}`;
})()"""
BROKEN = """Promise.all([...document.images].map(each => { each.loading = "eager";
    return each.decode().then(() => "", () => each.src); })).then(all => all.filter(Boolean))"""
DARK = """(() => { const [r, g, b] = getComputedStyle(document.body).backgroundColor
    .match(/[0-9.]+/g).map(Number); return r + g + b < 384; })()"""


def open_pages(browser: chromium.Browser, base: str, files: list[Path]) -> tuple[int, list[str]]:
    """How often a page was looked at, and what was wrong with it."""
    seen, wrong = 0, []
    for file in files:
        for scheme in SCHEMES:
            browser.show(base + address(file), scheme, WIDTHS["desktop"])
            for device, width in WIDTHS.items():
                browser.resize(width)
                browser.evaluate(SETTLED)
                seen += 1
                place = f"{address(file) or '/'} ({device}, {scheme})"
                wrong += [f"{place}: {each}" for each in _wrong(browser, base, scheme)]
                browser.events.clear()
    return seen, wrong


def _wrong(browser: chromium.Browser, base: str, scheme: str) -> Iterator[str]:
    """What is wrong with the page that is shown, since it was opened or looked at last."""
    yield from (str(complaint)[:300] for complaint in browser.complaints())
    for url in browser.requests():
        if not url.startswith((base, "data:", "blob:")):
            yield f"asks {url}"
    for failed in browser.named("Network.loadingFailed"):
        if not failed.get("canceled"):
            yield f"{failed['errorText']} ({failed['type']})"
    yield from (f"{url} is no picture" for url in browser.evaluate(BROKEN))
    if too_wide := browser.evaluate(TOO_WIDE):
        yield too_wide
    if browser.evaluate(DARK) != (scheme == "dark"):
        yield "the page does not follow the scheme"


def search(browser: chromium.Browser, base: str) -> list[str]:
    """Type what people look for; which pages were not found."""
    wrong = []
    for words, expected in SEARCHES.items():
        browser.show(base, "light", WIDTHS["desktop"])
        browser.evaluate(SETTLED)
        found = _found(browser, words)
        if not any(expected in link for link in found[:5]):
            wrong.append(f"a search for {words!r} does not find {expected}, but {found[:5]}")
    return wrong


# The theme's search is in a shadow tree, so what it shows is looked for in all of these.
ROOTS = """(() => { const below = root => [root, ...[...root.querySelectorAll("*")]
    .filter(each => each.shadowRoot).flatMap(each => below(each.shadowRoot))];
    return below(document).slice(1); })()"""
LISTED = f"{ROOTS}.flatMap(root => [...root.querySelectorAll('a[href]')].map(each => each.href))"
TYPING = """(() => { let each = document.activeElement;
    while (each && each.shadowRoot) each = each.shadowRoot.activeElement;
    return each !== null && each.tagName === "INPUT"; })()"""


def _found(browser: chromium.Browser, words: str, patience: float = 30) -> list[str]:
    """The addresses that a search lists: open it by its button, type, and wait for an answer."""
    browser.evaluate("document.querySelector('.md-search__button').click()")
    _wait(browser, TYPING, patience)
    browser.call("Input.insertText", text=words)
    return list(_wait(browser, LISTED, patience) or ())


def _wait(browser: chromium.Browser, expression: str, patience: float) -> Any:
    """The value of an expression once it is true; its last value if that takes too long."""
    deadline = time.monotonic() + patience
    while not (value := browser.evaluate(expression)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def take_screenshots(browser: chromium.Browser, base: str, into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    for name in PICTURED:
        for scheme in SCHEMES:
            for device, width in WIDTHS.items():
                browser.show(base + name.removesuffix("index.html"), scheme, width)
                browser.evaluate(SETTLED)
                time.sleep(0.3)
                file = (
                    into
                    / f"{name.split('/')[-2] if '/' in name else 'index'}-{device}-{scheme}.png"
                )
                file.write_bytes(browser.picture())
                print(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screenshots", type=Path, help="write pictures of two pages there")
    arguments = parser.parse_args()
    files = sorted(SITE.rglob("*.html"))
    if not files:
        parser.error("there is no site: python docs/site/build.py builds it")
    links = check_links(files)
    print(f"{len(files)} pages; {links.inside} links within the site, {links.anchors} of them to a "
          f"heading; {links.outside} to other sites, which were not followed")  # fmt: skip
    wrong = links.wrong
    program = chromium.program()
    if program is None:
        print(f"the pages were not opened: {chromium.MISSING}")
    else:
        with tempfile.TemporaryDirectory() as profile, served() as base:
            browser = chromium.Browser(program, Path(profile))
            try:
                seen, complaints = open_pages(browser, base, files)
                wrong += complaints + search(browser, base)
                if arguments.screenshots:
                    take_screenshots(browser, base, arguments.screenshots)
            finally:
                browser.close()
        print(f"{seen} views of them in {os.path.basename(program)}: {len(WIDTHS)} widths, "
              f"{len(SCHEMES)} schemes; {len(SEARCHES)} searches")  # fmt: skip
    for each in wrong:
        print(f"wrong: {each}")
    print(f"{len(wrong)} warnings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
