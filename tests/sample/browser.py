"""A headless Chromium, driven by its devtools protocol; the standard library does it all."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
from pathlib import Path
from typing import Any

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome",
             "google-chrome-stable", "chrome-headless-shell")  # fmt: skip
MISSING = "no Chromium: apt-get install chromium-headless-shell"


def program() -> str | None:
    """The path of a Chromium, or None if there is none."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


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

    def resize(self, width: int, height: int = 900) -> None:
        """Make the window so large."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def show(self, url: str, scheme: str, width: int = 1200) -> None:
        """Open a page, in a light or a dark scheme, and wait until it is loaded."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.resize(width)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not self.named("Page.loadEventFired"):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression. If that is a promise, it is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
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
