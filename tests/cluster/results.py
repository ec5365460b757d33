"""What came of the runs with real processes: bench/results/cluster.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCH = Path(__file__).resolve().parents[2] / "bench"
FILE = BENCH / "results" / "cluster.json"


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the worst."""
    return {"median": round(median(seconds), 2), "worst": round(max(seconds), 2)}


def keep(section: str, name: str, row: dict[str, Any]) -> None:
    """Write a row, with the date, the commit and the machine; others stay."""
    sys.path.insert(0, str(BENCH))
    import machine

    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    head = {**machine.described(), "load_average": round(machine.load_average(), 2)}
    known.setdefault(section, {})[name] = {**row, **head}
    FILE.write_text(json.dumps(known, indent=1) + "\n")
