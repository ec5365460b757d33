"""``catalogue``: all bundled ops for one GPU architecture and this CPU, cold; each op's warm load.

The GPU's part needs nvcc and no GPU. Loads are of the CPU's libraries, in fresh processes that have
torch; opkiln's and the bare load of the same file take turns.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from children import Caches, Workspace, ask, finish, timed
from measured import Bar, Failure, Row, Sample

from measure import Options
from measure.warm_load import OVERHEAD_MS, sha256_rate

NAME = "catalogue"
ARCH = "9.0a"
COLD_S = 60.0


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """The cold build and of what it is made, then the load of each op beyond the bare one."""
    return [*_cold(options, workspace), *_loads(options, workspace)]


def _cold(options: Options, workspace: Workspace) -> list[Row]:
    walls: list[float] = []
    parts: Counter[str] = Counter()
    try:
        for _ in range(options.times(3, 1)):
            with workspace.cold() as caches:
                trace = caches.root / "trace.json"
                command = _build("cpu", f"cuda:{ARCH}")
                walls.append(timed([*command, "--trace", str(trace)], caches))
                parts = _seconds(json.loads(trace.read_text())["traceEvents"])
    except Failure as failure:
        return [Row(NAME, "opkiln", f"all ops, {ARCH} and CPU", None, str(failure))]
    wall = Sample(tuple(walls), "s")
    slowest = ", ".join(f"{op} {taken:.0f} s" for op, taken in parts.most_common(4))
    return [
        Row(
            NAME,
            "opkiln",
            f"all ops, {ARCH} and CPU, cold",
            wall,
            f"of all steps: {slowest}",
            bar=Bar(COLD_S, wall.median, f"<= {COLD_S:.0f} s"),
            details={"step_seconds": dict(parts)},
        )
    ]


def _build(*targets: str) -> list[str]:
    command = [sys.executable, "-m", "opkiln", "build", "--all"]
    return [*command, *(part for target in targets for part in ("--target", target))]


def _seconds(events: list[dict[str, Any]]) -> Counter[str]:
    """What the steps of each op took, by the engine's trace: a step's category is its op."""
    found: Counter[str] = Counter()
    for event in events:
        if event["ph"] == "X" and event["name"] != event["cat"]:
            found[event["cat"]] += event["dur"] / 1e6
    return found


def _loads(options: Options, workspace: Workspace) -> list[Row]:
    from opkiln.builder.registry import ALL_OPS, bundled_ops

    try:
        finish(_build("cpu"), workspace.warm)
    except Failure as failure:
        return [Row(NAME, "opkiln", "loads", None, str(failure))]
    rate = sha256_rate()
    names = [name for name in bundled_ops() if "cpu" in ALL_OPS[name].BACKENDS]
    return [_load(name, options, workspace.warm, rate) for name in names]


def _load(name: str, options: Options, caches: Caches, rate: float) -> Row:
    what = f"load of {name} beyond load_library"
    try:
        # Once each untimed: bytecode written, pages cached.
        path = ask(["child_catalogue.py", name], caches)["path"]
        ask(["child_catalogue.py", path], caches)
        beyond = []
        for _ in range(options.times(11, 3)):
            mine = ask(["child_catalogue.py", name], caches)["load"]
            bare = ask(["child_catalogue.py", path], caches)["load"]
            beyond.append((mine - bare) * 1e3)
    except Failure as failure:
        return Row(NAME, "opkiln", what, None, str(failure))
    sample = Sample(tuple(beyond), "ms")
    size = Path(path).stat().st_size
    limit = OVERHEAD_MS + size / rate * 1e3
    return Row(
        NAME,
        "opkiln",
        what,
        sample,
        f"{size / 1e3:.0f} kB",
        bar=Bar(limit, sample.median, f"<= {limit:.2f} ms"),
        details={"library_bytes": size, "sha256_bytes_per_second": rate},
    )
