"""The report's page in a real browser: every op is there, nothing is fetched or complained of."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import shutil
import signal
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from test_report_forms import backend, filled, op

import opkiln
from opkiln.cli import main
from opkiln.registry import libraries
from opkiln.report import page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome",
            "google-chrome-stable", "chrome-headless-shell")  # fmt: skip
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


class Browser:
    """A headless Chromium with one tab, driven through a pair of pipes."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs, self._to = os.pipe()
        self._from, writes = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4; ours must not be in their way.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs, writes)]
        argv = [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                "--no-first-run", "--disable-background-networking",
                f"--user-data-dir={profile}"]  # fmt: skip
        self._pid = os.posix_spawn(program, argv, os.environ, file_actions=[
            *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)),
            (os.POSIX_SPAWN_DUP2, ends[0], 3),
            (os.POSIX_SPAWN_DUP2, ends[1], 4),
        ])  # fmt: skip
        for end in (theirs, writes, *ends):
            os.close(end)
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], 60)
            assert ready, "the browser does not answer"
            chunk = os.read(self._from, 1 << 16)
            assert chunk, "the browser went away"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def named(self, *methods: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") in methods]

    def show(self, file: Path, scheme: str, width: int = 1200) -> None:
        """Open a page, in a light or a dark scheme, and wait until it is loaded."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        while not self.named("Page.loadEventFired"):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def complaints(self) -> list[dict[str, Any]]:
        return self.named("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")

    def requests(self) -> list[str]:
        return [event["request"]["url"] for event in self.named("Network.requestWillBeSent")]

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        os.kill(self._pid, signal.SIGKILL)  # it has nothing to lose: its profile is the test's
        os.waitpid(self._pid, 0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell")
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
    browser.show(file, scheme)
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
    browser.show(file, "light")
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
        browser.show(file, scheme)
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
    browser.show(file, "light")
    shown = "document.querySelector('tr.op .trace').checkVisibility()"
    assert browser.evaluate(shown) is False
    browser.evaluate("document.querySelector('tr.op summary').click()")
    assert browser.evaluate(shown) is True
    assert "taken" in browser.evaluate("document.querySelector('tr.op .trace').innerText")


def test_a_narrow_window_has_nothing_that_stands_out(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(thirty(), encoding="utf-8")
    browser.show(file, "light", width=420)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 420
