"""docs/pictures/timeline.svg: a parallel build, step by step, from the engine's own trace.

    python bench/timeline.py              # draws bench/results/timeline.json again; needs no torch
    python bench/timeline.py --record     # builds with an empty store, keeps the trace and draws it

The trace is what ``opkiln build --trace`` writes for Perfetto. The same trace gives the same
picture, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import machine
from picture import STYLE

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results" / "timeline.json"
TARGET = BENCH.parent / "docs" / "pictures" / "timeline.svg"
COMMAND = (
    "opkiln build cpu_adam cpu_adagrad cpu_lion packbits quantizer --target cpu:x86-64-v2,x86-64-v3"
)
STEPS_BELOW = 1000  # run/chrome.py: lanes of steps; those of whole builds are above
WIDTH, LEFT, LANE, GAP, TOP = 760, 74, 30, 8, 44
LIGHT = ("#bc4c00", "#0969da", "#1a7f37", "#8250df", "#9a6700", "#59636e")
DARK = ("#f0883e", "#4493f8", "#3fb950", "#ab7df8", "#d29922", "#9198a1")
COLOURS = "".join(f".op{n} {{ fill: {colour} }}\n" for n, colour in enumerate(LIGHT))
COLOURS += "@media (prefers-color-scheme: dark) {\n"
COLOURS += "".join(f".op{n} {{ fill: {colour} }}\n" for n, colour in enumerate(DARK)) + "}\n"
LINES = """
.in { fill: #ffffff; font-size: 11px }
.grid { stroke: #d1d9e0; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
.in { fill: #0d1117 }
.grid { stroke: #3d444d }
}
"""


class Step(NamedTuple):
    """A step of a build, in seconds since the first one began."""

    lane: int
    op: str
    target: str
    name: str
    start: float
    end: float


def steps(trace: dict[str, Any]) -> list[Step]:
    """The steps that ran, in the order they began."""
    ran = [
        event for event in trace["traceEvents"]
        if event["ph"] == "X" and event["tid"] < STEPS_BELOW and not event["args"].get("cached")
    ]  # fmt: skip
    first = min(event["ts"] for event in ran)
    found = [
        Step(event["tid"], *event["cat"].split(" ", 1), event["name"],
             (event["ts"] - first) / 1e6, (event["ts"] + event["dur"] - first) / 1e6)
        for event in ran
    ]  # fmt: skip
    return sorted(found, key=lambda step: (step.start, step.lane))


def draw(document: dict[str, Any]) -> str:
    """The picture of a kept trace."""
    ran = steps(document["trace"])
    ops = list(dict.fromkeys(step.op for step in ran))
    lanes = sorted({step.lane for step in ran})
    whole = max(step.end for step in ran)
    scale = (WIDTH - LEFT - 10) / whole
    bottom = TOP + len(lanes) * (LANE + GAP)
    parts = ['<text class="title" x="0" y="16">One parallel build, step by step</text>']
    parts += _legend(ops)
    unit = next(each for each in (0.5, 1, 2, 5, 10, 20, 60) if whole / each <= 12)
    for number in range(int(whole / unit) + 1):
        x = LEFT + number * unit * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP - 4}V{bottom}"/>')
        parts.append(f'<text class="faint" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">'
                     f"{number * unit:g} s</text>")  # fmt: skip
    for number, lane in enumerate(lanes):
        y = TOP + number * (LANE + GAP)
        parts.append(f'<text class="faint" x="0" y="{y + 20}">step lane {number + 1}</text>')
        for step in (each for each in ran if each.lane == lane):
            parts += _bar(step, ops.index(step.op) % len(LIGHT), y, scale)
    busy = sum(step.end - step.start for step in ran) / (len(lanes) * whole)
    host = document["machine"]
    ended = f"{len(ran)} steps in {whole:.1f} s; the lanes were busy for {busy:.0%} of the time."
    where = f"{document['date'][:10]}, {host['cores']} cores, load average {document['load']:.1f}."
    footer = (f"$ {document['command']}", f"{ended} {where}")
    parts += [f'<text class="faint" x="0" y="{bottom + 36 + 16 * line}">{escape(said)}</text>'
              for line, said in enumerate(footer)]  # fmt: skip
    height = bottom + 62
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="The steps of a parallel build over time">\n'
        f"<style>{STYLE}{LINES}{COLOURS}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _legend(ops: list[str]) -> list[str]:
    parts, x = [], 0.0
    for number, op in enumerate(ops):
        parts.append(
            f'<rect class="op{number % len(LIGHT)}" x="{x:g}" y="24" width="10" height="10"/>'
        )
        parts.append(f'<text class="faint" x="{x + 15:g}" y="33">{escape(op)}</text>')
        x += 34 + 7 * len(op)
    return parts


def _bar(step: Step, colour: int, y: float, scale: float) -> list[str]:
    x, length = LEFT + step.start * scale, max((step.end - step.start) * scale - 1, 1)
    about = f"{step.op} for {step.target}: {step.name}, {step.end - step.start:.2f} s"
    place = f'x="{x:.1f}" y="{y}" width="{length:.1f}" height="{LANE}"'
    parts = [f'<rect class="op{colour}" {place} rx="2"><title>{escape(about)}</title></rect>']
    if len(step.name) * 6.2 + 6 < length:
        parts.append(f'<text class="in" x="{x + 4:.1f}" y="{y + 19}">{escape(step.name)}</text>')
    return parts


def record() -> dict[str, Any]:
    """Build with an empty store. What the engine traced, and what it was traced on."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.json"
        environment = {**os.environ, "OPKILN_CACHE_DIR": f"{scratch}/store"}
        argv = [sys.executable, "-m", *shlex.split(COMMAND), "--trace", str(trace)]
        subprocess.run(argv, env=environment, check=True)
        traced = json.loads(trace.read_text())
        # Without remarks: those about waiting name this host.
        traced["traceEvents"] = [each for each in traced["traceEvents"] if each["ph"] != "i"]
        found = {"load": load, "command": COMMAND, "trace": traced}
        return {**machine.described(), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="build and keep the trace first")
    if parser.parse_args().record:
        RESULTS.write_text(json.dumps(record(), indent=1) + "\n")
    TARGET.write_text(draw(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
