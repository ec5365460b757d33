"""The bench: opkiln beside its peers, in one run. ``make bench``, or ``python bench/run.py``.

A whole run prints one table, writes ``bench/results/cpu.json`` and draws
``docs/pictures/bench.svg``; a partial or quick one prints its table and leaves both alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import ModuleType

import machine
import picture
import table
from children import Workspace
from measure import (
    Options,
    adam_step,
    aot,
    catalogue,
    cold_build,
    deepspeed_on_opkiln,
    drop_in,
    importing,
    prebuilt_load,
    reporting,
    syscalls,
    warm_load,
)
from measured import Failure, Row

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "bench" / "results" / "cpu.json"
PICTURE = REPOSITORY / "docs" / "pictures" / "bench.svg"

# In the order in which they run: the cold builds fill the caches that the warm measures use.
MEASURES: dict[str, ModuleType] = {
    module.NAME: module
    for module in (
        cold_build, importing, warm_load, prebuilt_load, syscalls, drop_in, aot, catalogue,
        reporting, adam_step, deepspeed_on_opkiln,
    )
}  # fmt: skip
SHOWN = (
    "import", "warm-load", "prebuilt-load", "syscalls", "cold-build", "drop-in", "aot",
    "catalogue", "report", "adam-step", "deepspeed-on-opkiln",
)  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=SHOWN, help="measure this; repeatable")
    parser.add_argument("--repeats", type=int, help="repeats of everything")
    parser.add_argument("--quick", action="store_true", help="few repeats, fewer peers")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--keep", type=Path, help="keep and reuse the built caches in this folder")
    parser.add_argument("--list", action="store_true", help="name the measures and end")
    return parser.parse_args()


def measured(name: str, options: Options, workspace: Workspace) -> list[Row]:
    """The rows of one measure; one row with the reason when it broke down."""
    begin = time.perf_counter()
    print(f"bench: {name} ...", end="", file=sys.stderr, flush=True)
    try:
        rows: list[Row] = MEASURES[name].rows(options, workspace)
    except Failure as failure:
        rows = [Row(name, "all", "", None, str(failure))]
    print(f" {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return rows


def main() -> int:
    """Measure, print, store; 1 when a bar was missed or opkiln could not be measured."""
    asked = arguments()
    if asked.list:
        print("\n".join(SHOWN))
        return 0
    names = asked.only or list(SHOWN)
    options = Options(asked.repeats, asked.quick)
    head = machine.described()
    loads = [machine.load_average()]
    workspace = Workspace(asked.keep)
    try:
        found = {name: measured(name, options, workspace) for name in MEASURES if name in names}
    finally:
        workspace.close()
    loads.append(machine.load_average())
    head["load_average"] = {"before": loads[0], "after": loads[1]}
    rows = [row for name in SHOWN for row in found.get(name, [])]
    print(machine.heading(head))
    print(f"load average before {loads[0]:.2f}, after {loads[1]:.2f}\n")
    print(table.render(rows))
    whole = asked.only is None and not asked.quick
    if target := asked.json or (RESULTS if whole else None):
        table.store(target, head, rows)
    if whole:
        picture.draw(RESULTS, PICTURE)
    missed = [row for row in rows if row.bar is not None and not row.bar.met]
    broken = [row for row in rows if row.sample is None and row.who.startswith(("opkiln", "all"))]
    return 1 if missed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
