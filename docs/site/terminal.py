"""docs/pictures/demo.svg: a terminal, recorded while the commands really ran.

    .venv/bin/python docs/site/terminal.py --record     # runs them, keeps demo.cast, draws it
    python docs/site/terminal.py                        # draws docs/pictures/demo.cast again

The recording is an asciicast, version 2. In the picture each line is faint until it was printed; it
is an SVG without a script. The same recording gives the same picture, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
CAST = ROOT / "docs" / "pictures" / "demo.cast"
PICTURE = CAST.with_suffix(".svg")
COLUMNS = 88
IDLE = 3  # seconds: silence is cut to this when it is shown
PROMPT = "\x1b[32m$\x1b[0m "
TYPED, THOUGHT, REST = 0.04, 0.7, 6.0  # seconds: a character, before a command, at the end
COMMANDS = ("opkiln demo",)
LINE, WIDE, LEFT, TOP = 20, 8.43, 16, 46  # pixels: a line, a character, the margins
STYLE = """
.paper { fill: #ffffff; stroke: #d1d9e0 } .bar { fill: #f6f8fa }
text { font: 14px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328 }
text { white-space: pre }
.good { fill: #1a7f37 } .bad { fill: #cf222e } .weak { fill: #59636e } .strong { font-weight: 600 }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; stroke: #3d444d } .bar { fill: #151b23 }
text { fill: #f0f6fc }
.good { fill: #3fb950 } .bad { fill: #f85149 } .weak { fill: #9198a1 }
}
"""
LOOKS = {"1": "strong", "2": "weak", "31": "bad", "32": "good"}
_OPENED = re.compile(r"(\x1b\[[1-9][0-9;]*m)\n")  # a colour that begins with the next line
_CODE = re.compile(r"\x1b\[([0-9;]*)m")


class Line(NamedTuple):
    """A line of the terminal, and the second in which it is complete."""

    at: float
    text: str


def record() -> list[Any]:
    """Run the commands in a terminal with an empty cache; the header and events of an asciicast."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        environment = {
            "HOME": str(home), "TERM": "xterm", "COLUMNS": str(COLUMNS), "OPKILN_PROGRESS": "lines",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip
        events: list[Any] = []
        now = 0.0
        for command in COMMANDS:
            now += THOUGHT
            events.append([round(now, 3), "o", PROMPT])
            for character in command:
                now += TYPED
                events.append([round(now, 3), "o", character])
            events.append([round(now, 3), "o", "\r\n"])
            began = time.monotonic()
            for at, text in _printed(command, home, environment):
                shown = text.replace(str(home), "~")
                events.append([round(now + at - began, 3), "o", shown])
            now += time.monotonic() - began
        header = {
            "version": 2, "width": COLUMNS, "height": 30, "idle_time_limit": IDLE,
            "title": f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}",
        }  # fmt: skip
        return [header, *events]


def _printed(command: str, work: Path, environment: dict[str, str]) -> list[tuple[float, str]]:
    """What a command prints on a terminal, and when."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(["bash", "-c", command], cwd=work, env=environment,
                             stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)  # fmt: skip
    os.close(theirs)
    found = []
    while True:
        try:
            text = os.read(ours, 1 << 16)
        except OSError:  # a pseudo-terminal ends with an error when nobody has it open
            break
        found.append((time.monotonic(), text.decode()))
    os.close(ours)
    assert child.wait() == 0, (command, found)
    return found


def lines(cast: list[Any]) -> list[Line]:
    """The lines of a recording, each with the time of its last character.

    Silence is cut to what the recording says, and long lines are broken, as a terminal does.
    """
    header, *events = cast
    found, text, shown, before = [], "", 0.0, 0.0
    for at, _, printed in events:
        shown += min(at - before, header["idle_time_limit"])
        before = at
        text = _OPENED.sub(r"\n\1", text + printed.replace("\r\n", "\n"))
        *complete, text = text.split("\n")
        found += [Line(shown, part) for line in complete for part in _broken(line, header["width"])]
    return found


def _broken(line: str, width: int) -> list[str]:
    if len(_CODE.sub("", line)) <= width:
        return [line]
    return [line[at : at + width] for at in range(0, len(line), width)]


def draw(cast: list[Any]) -> str:
    """The picture of a recording."""
    header, shown = cast[0], lines(cast)
    # The first line is there at once: whoever opens the page must not see an empty box.
    start = shown[0].at
    whole = shown[-1].at - start + REST
    width, height = round(2 * LEFT + header["width"] * WIDE), TOP + LINE * len(shown) + 8
    parts, frames = [], []
    for number, line in enumerate(shown):
        y = TOP + LINE * number + 14
        share = 100 * (line.at - start) / whole
        if share == 0:
            parts.append(f'<text x="{LEFT}" y="{y}">{_spans(line.text)}</text>')
            continue
        frames.append(f"@keyframes l{number} {{ 0%, {share:.2f}% {{ opacity: .2 }} "
                      f"{share + 0.01:.2f}%, 100% {{ opacity: 1 }} }}")  # fmt: skip
        parts.append(f'<text class="line" style="animation-name: l{number}" x="{LEFT}" y="{y}">'
                     f"{_spans(line.text)}</text>")  # fmt: skip
    motion = (
        "@media (prefers-reduced-motion: no-preference) {\n"
        f".line {{ animation-duration: {whole:.1f}s; animation-iteration-count: infinite }}\n"
        + "\n".join(frames)
        + "\n}\n"
    )
    title = escape(header["title"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{title}, a recorded terminal">\n'
        f"<style>{STYLE}{motion}</style>\n"
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        f'<path class="bar" d="M1 9a8 8 0 0 1 8-8h{width - 18}a8 8 0 0 1 8 8v23h-{width - 2}z"/>\n'
        f'<text class="weak" x="{width / 2:g}" y="21" text-anchor="middle">{title}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _spans(text: str) -> str:
    """A line as SVG: its colours become classes."""
    parts = _CODE.split(text)
    spans = [escape(parts[0])]
    for code, words in zip(parts[1::2], parts[2::2], strict=True):
        look = LOOKS.get(code, "")
        spans.append(f'<tspan class="{look}">{escape(words)}</tspan>' if look else escape(words))
    return "".join(spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="run the commands first")
    if parser.parse_args().record:
        CAST.write_text("".join(json.dumps(event) + "\n" for event in record()))
    PICTURE.write_text(draw([json.loads(line) for line in CAST.read_text().splitlines()]))


if __name__ == "__main__":
    main()
