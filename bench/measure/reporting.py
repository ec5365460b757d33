"""``report``: the environment report of each system, and a build of what is built."""

from __future__ import annotations

import sys
from pathlib import Path

from children import Workspace, timed
from measured import Failure, Row, Sample

from measure import Options

NAME = "report"


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """Wall time of the commands, whole processes, taking turns."""
    commands = {
        "opkiln": ("opkiln report", [sys.executable, "-m", "opkiln", "report"]),
        "DeepSpeed": ("ds_report", [str(Path(sys.executable).parent / "ds_report")]),
        "opkiln, built": ("opkiln build --all", [sys.executable, "-m", "opkiln", "build", "--all"]),
    }
    times: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    for who, (_, command) in commands.items():
        try:
            timed(command, workspace.warm)  # builds what is to be found built, writes bytecode
            times[who] = []
        except Failure as failure:
            failures[who] = str(failure)
    for _ in range(options.times(7, 3)):
        for who, taken in times.items():
            taken.append(timed(commands[who][1], workspace.warm) * 1e3)
    table = []
    mine = Sample(tuple(times["opkiln"]), "ms") if "opkiln" in times else None
    for who, (what, _) in commands.items():
        if who in failures:
            table.append(Row(NAME, who, what, None, failures[who]))
            continue
        sample = Sample(tuple(times[who]), "ms")
        ratio = mine.median / sample.median if mine and who == "DeepSpeed" else None
        table.append(Row(NAME, who, what, sample, ratio=ratio))
    return table
