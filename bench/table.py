"""The table on stdout, and the results file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import machine
from measured import Row, Sample

HEAD = ("measure", "who", "what", "median", "min..max (n)", "opkiln / it", "bar")


def figure(value: float, unit: str) -> str:
    """A value with three significant digits: ``1.23 ms``, ``48.1 GB/s``, ``71``."""
    if unit == "count":
        return f"{value:.0f}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f} {unit}"


def ratio(value: float) -> str:
    """``0.31``, or ``1/42`` once decimals stop meaning anything."""
    return f"1/{1 / value:.0f}" if 0 < value < 0.1 else f"{value:.2f}"


def _spread(sample: Sample) -> str:
    if len(sample.values) == 1:
        return "(1)"
    low, high = (figure(value, sample.unit).split(" ")[0] for value in (sample.low, sample.high))
    return f"{low}..{high} ({len(sample.values)})"


def cells(row: Row) -> tuple[str, ...]:
    """One row as the text of its columns."""
    if row.sample is None:
        return row.measure, row.who, row.what, "-", "", "", row.note
    verdict = "" if row.bar is None else f"{row.bar.text}: {'met' if row.bar.met else 'MISSED'}"
    return (
        row.measure,
        row.who,
        row.what,
        figure(row.sample.median, row.sample.unit),
        _spread(row.sample),
        "" if row.ratio is None else ratio(row.ratio),
        "; ".join(part for part in (verdict, row.note) if part),
    )


def render(rows: Sequence[Row]) -> str:
    """The whole table, columns aligned, a blank line between measures."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD) - 1)]
    text: list[str] = []
    previous = ""
    for line in lines:
        if line[0] != previous:
            text.append("")
        previous = line[0]
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        text.append("  ".join([*padded, line[-1]]).rstrip())
    return "\n".join(text[1:])


def store(path: Path, head: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write the results file: what was measured where, and every repeat of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {**head, "rows": [row.as_json() for row in rows]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def finish(head: dict[str, Any], rows: Sequence[Row], out: Path | None) -> int:
    """Print the machine, its load and the table, and store them in ``out``. The exit status: 1 when
    a bar was missed."""
    print(machine.heading(head))
    print("load average before {before:.2f}, after {after:.2f}\n".format(**head["load_average"]))
    print(render(rows))
    if out is not None:
        store(out, head, rows)
    return int(any(row.bar is not None and not row.bar.met for row in rows))
