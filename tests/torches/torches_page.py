"""The table of torches in docs/compatibility.md, from what ``make test-torches`` kept.

As a program it writes the table into the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "bench" / "results" / "torches.json"
BEGIN, END = "<!-- torches -->\n", "<!-- end of torches -->"

COLUMNS = {
    "wheel": "wheel of CPU ops",
    "decorated": "decorated op, from the cache",
    "cpu": "CPU library of op.h",
    "cuda-nvcc": "CUDA library by nvcc",
    "cuda-nvrtc": "CUDA library by NVRTC",
}
WORDS = {"wheel": "runs", "decorated": "runs", "cpu": "runs", "cuda-nvcc": "loads",
         "cuda-nvrtc": "loads"}  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The lines of the page: when and with what, and a row for each torch, oldest first."""
    rows = [row for row in result["rows"] if "skipped" not in row]
    shown = [name for name in COLUMNS if any(name in row for row in rows)]
    torch, date = _release(result["versions"]["torch"]), result["date"].split()[0]
    lines = [f"Built with torch {torch}, {date}, commit {result['commit']}."]
    if "wheel" in result:
        lines.append(f"The wheel, one file for all: `{result['wheel']['name']}`.")
    lines += ["", "| torch | its CUDA | Python | " + " | ".join(map(COLUMNS.get, shown)) + " |"]
    lines.append("|---" * (len(shown) + 3) + "|")
    latest = {_release(row["torch"]): row for row in rows}
    for release in sorted(latest, key=lambda text: tuple(map(int, text.split(".")))):
        row = latest[release]
        cuda = "none" if row["cuda"] == "None" else row["cuda"]
        cells = [WORDS[name] if row[name] == "passed" else row[name] for name in shown]
        lines.append(f"| {release} | {cuda} | {row['python']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _release(version: str) -> str:
    return version.partition("+")[0]


def with_table(page: str, result: dict[str, Any]) -> str:
    found = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(found.findall(page)) == 1
    return found.sub(lambda _: f"{BEGIN}{table(result)}{END}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULTS.read_text())))
