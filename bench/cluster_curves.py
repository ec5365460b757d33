"""docs/pictures/cluster_scale.svg: what ``opkiln.ensure`` takes, by the number of ranks.

    python bench/cluster_curves.py        # from bench/results/cluster_scale.json; needs no torch

Both axes are logarithmic. The same results give the same picture, byte for byte.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from picture import STYLE

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results" / "cluster_scale.json"
TARGET = BENCH.parent / "docs" / "pictures" / "cluster_scale.svg"
WIDTH, PANEL, HEIGHT, TOP, LEFT = 760, 330, 210, 34, 50
MOST_RANKS = 100_000
LINES = """
.grid { stroke: #d1d9e0; stroke-width: 1 }
.warm { stroke: #8c959f }
.cold { stroke: #bc4c00 }
.large { stroke: #0969da }
polyline { fill: none; stroke-width: 2 }
.dot.warm { fill: #8c959f } .dot.cold { fill: #bc4c00 } .dot.large { fill: #0969da }
@media (prefers-color-scheme: dark) {
.grid { stroke: #3d444d }
.cold { stroke: #f0883e } .dot.cold { fill: #f0883e }
.large { stroke: #4493f8 } .dot.large { fill: #4493f8 }
}
"""
CLASSES = {"warm": "warm", "cold, 1 MB": "cold", "cold, 32 MB": "large"}


class Panel(NamedTuple):
    """One chart: what it shows of a row, between two powers of ten."""

    title: str
    value: Callable[[dict[str, Any]], float]
    least: int
    most: int


PANELS = (
    Panel("Seconds from the last call to the last end", lambda row: row["seconds"], -3, 3),
    Panel("Seconds that the store's host is busy", lambda row: row["store_busy_s"], -3, 3),
)


def place(panel: Panel, left: int, ranks: int, value: float) -> tuple[float, float]:
    x = left + LEFT + math.log10(ranks) / math.log10(MOST_RANKS) * (PANEL - LEFT)
    high = min(max(math.log10(max(value, 1e-9)), panel.least), panel.most)
    y = TOP + HEIGHT * (panel.most - high) / (panel.most - panel.least)
    return round(x, 1), round(y, 1)


def drawn(panel: Panel, left: int, rows: list[dict[str, Any]]) -> list[str]:
    parts = [f'<text class="title" x="{left}" y="16">{escape(panel.title)}</text>']
    for power in range(panel.least, panel.most + 1):
        x, y = place(panel, left, 1, 10.0**power)
        parts.append(f'<path class="grid" d="M{x} {y}H{left + PANEL}"/>')
        text = f'<text class="faint" x="{x - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g}'
        parts.append(f"{text}</text>")
    for power in range(6):
        x, y = place(panel, left, 10**power, 10.0**panel.least)
        text = f'<text class="faint" x="{x}" y="{y + 18}" text-anchor="middle">{10**power:,}'
        parts.append(f"{text}</text>")
    for case, kind in cases_of(rows):
        points = [place(panel, left, r["ranks"], panel.value(r)) for r in rows if r["case"] == case]
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline class="{kind}" points="{line}"/>')
        parts += [f'<circle class="dot {kind}" cx="{x}" cy="{y}" r="3"/>' for x, y in points]
    return parts


def cases_of(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    there = {row["case"] for row in rows}
    return [(case, kind) for case, kind in CLASSES.items() if case in there]


def draw(results: Path, target: Path) -> None:
    """Write the picture of a results file. Raises FileNotFoundError if it is not there."""
    document = json.loads(results.read_text())
    rows = document["rows"]
    parts = drawn(PANELS[0], 0, rows) + drawn(PANELS[1], WIDTH - PANEL, rows)
    y = TOP + HEIGHT + 48
    x = 0
    for case, kind in cases_of(rows):
        parts.append(f'<circle class="dot {kind}" cx="{x + 5}" cy="{y - 4}" r="4"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{escape(case)}</text>')
        x += 110
    about = (
        "Ranks (8 for each node) that run the shipped protocol, simulated; "
        f"{document['compile_s']:g} s to compile one op, calls within a second."
    )
    parts.append(f'<text class="faint" x="0" y="{y + 22}">{escape(about)}</text>')
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 34}" width="{WIDTH}" '
        f'height="{y + 34}" role="img" aria-label="Seconds by the number of ranks">\n'
        f"<style>{STYLE}{LINES}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    draw(RESULTS, TARGET)
    sys.exit(0)
