"""docs/pictures/bench.svg from a results file: bars by hand, readable in light and dark.

``python bench/picture.py`` draws it again from ``bench/results/cpu.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from table import figure

WIDTH, LEFT, RIGHT = 760, 186, 150
BAR, GAP, HEAD, FOOT = 16, 6, 34, 48

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.faint { fill: #59636e; font-size: 12px }
.mine { fill: #bc4c00 }
.other { fill: #8c959f }
.floor { fill: #d1d9e0 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.faint { fill: #9198a1 }
.mine { fill: #f0883e }
.other { fill: #656c76 }
.floor { fill: #3d444d }
}
"""


class Group(NamedTuple):
    """A set of bars that share a scale: rows of one measure that match ``what``."""

    title: str
    measure: str
    what: tuple[str, ...]  # starts of the rows' ``what``; a row takes part if one fits


GROUPS = (
    Group("Warm load: import and load, torch already there", "warm-load", ("together",)),
    Group("First use of cpu_adam: compile and load", "cold-build", ("cpu_adam",)),
    Group("First use of a one-line op: compile and load", "cold-build", ("one line",)),
    Group("Environment report", "report", ("opkiln report", "ds_report")),
    Group("AdamW step, one tensor of 64M fp32", "adam-step", ("one tensor",)),
    Group("AdamW step, 600 tensors, 26.7M fp32", "adam-step", ("600 tensors",)),
)


def draw(results: Path, target: Path) -> None:
    """Write the picture of a results file."""
    document = json.loads(results.read_text())
    parts: list[str] = []
    y = 0
    for group in GROUPS:
        chosen = _chosen(document["rows"], group)
        if chosen:
            lines, y = _group(group.title, chosen, y)
            parts += lines
    machine = document["machine"]
    y += FOOT
    footer = (
        f"Medians of one run, {document['date'][:10]}, {machine['cpu']}, {machine['cores']} cores.",
        "Shorter is better; (n x): n times opkiln's time. Light bars are floors, not systems.",
    )
    for line, text in enumerate(footer):
        parts.append(f'<text class="faint" x="0" y="{y - 24 + 16 * line}">{escape(text)}</text>')
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" aria-label="opkiln beside its peers">\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _chosen(rows: list[dict[str, Any]], group: Group) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if row["measure"] == group.measure and row["what"].startswith(group.what)
    ]


def _group(title: str, rows: list[dict[str, Any]], y: int) -> tuple[list[str], int]:
    """The SVG of one group from ``y`` on, and where it ends."""
    y += HEAD
    lines = [f'<text class="title" x="0" y="{y - 10}">{escape(title)}</text>']
    longest = max(row.get("median", 0.0) for row in rows)
    mine = next((row["median"] for row in rows if _mine(row) and "median" in row), None)
    for row in rows:
        who = row["who"].removeprefix("floor: ")
        if _mine(row) and sum(map(_mine, rows)) > 1:
            who += "," + row["what"].partition(",")[2]
        label = f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(who)}</text>'
        if "median" not in row:
            lines += [label, f'<text class="faint" x="{LEFT}" y="{y + 12}">not measured</text>']
        else:
            length = max(row["median"] / longest * (WIDTH - LEFT - RIGHT), 1)
            shade = "mine" if _mine(row) else "floor" if row["who"].startswith("floor") else "other"
            value = figure(row["median"], row["unit"])
            if mine and not _mine(row):
                value += f"  ({_times(row['median'] / mine)})"
            lines += [
                label,
                f'<rect class="{shade}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}"/>',
                f'<text x="{LEFT + length + 6:.1f}" y="{y + 12}">{escape(value)}</text>',
            ]
        y += BAR + GAP
    return lines, y


def _mine(row: dict[str, Any]) -> bool:
    return bool(row["who"] == "opkiln")


def _times(value: float) -> str:
    return f"{value:.0f} x" if value >= 10 else f"{value:.2f} x"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    draw(here / "results" / "cpu.json", here.parent / "docs" / "pictures" / "bench.svg")
