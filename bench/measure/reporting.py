"""``report``: each system's report, opkiln's of thirty ops, and a build of what is built."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from children import Caches, Workspace, timed
from measured import Bar, Failure, Row, Sample

from measure import Options

NAME = "report"
OPS = 30
LIMIT_MS = 200.0

_OPS = """\
from opkiln.builder import CUDAOpBuilder, OpBuilder
from opkiln.base.model import ABI_NONE, PLAIN

for number in range({count}):
    # Every other one has versions for GPUs, too, as a library's ops do.
    base, more = OpBuilder, {{}}
    if number % 2:
        base, more = CUDAOpBuilder, {{"BACKENDS": ("cuda", "rocm", "cpu")}}
    globals()[f"Op{{number}}"] = type(f"Op{{number}}", (base,), {{
        "NAME": f"op_{{number}}", "KIND": PLAIN, "ABI": ABI_NONE,
        "sources": lambda self: ["answer.cpp"], **more}})
"""


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """Wall time of the commands, whole processes, taking turns."""
    return [*_beside_others(options, workspace), _of_many(options, workspace)]


def _of_many(options: Options, workspace: Workspace) -> Row:
    """A report when there are thirty ops: the bundled ones, and a package's, all built."""
    what = f"opkiln report, {OPS} ops"
    command = [sys.executable, "-m", "opkiln", "report"]
    caches = _installed(workspace)
    try:
        timed([sys.executable, "-m", "opkiln", "build", "--all"], caches)
        timed(command, caches)  # asks the compilers, writes bytecode
        taken = [timed(command, caches) * 1e3 for _ in range(options.times(7, 3))]
    except Failure as failure:
        return Row(NAME, "opkiln", what, None, str(failure))
    sample = Sample(tuple(taken), "ms")
    bar = Bar(LIMIT_MS, sample.median, f"<= {LIMIT_MS:.0f} ms")
    return Row(NAME, "opkiln", what, sample, bar=bar)


def _installed(workspace: Workspace) -> Caches:
    """The warm caches, with a distribution installed that brings the number of ops up to thirty."""
    from opkiln.builder.registry import bundled_ops

    count = OPS - len(bundled_ops())
    site = workspace.root / "thirty"
    (site / "many_ops").mkdir(parents=True, exist_ok=True)
    (site / "many_ops" / "__init__.py").write_text(_OPS.format(count=count))
    (site / "many_ops" / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    info = site / "many_ops-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: many-ops\nVersion: 1.0\n")
    names = "".join(f"op_{number} = many_ops:Op{number}\n" for number in range(count))
    (info / "entry_points.txt").write_text(f"[opkiln.ops]\n{names}")
    caches = workspace.warm
    path = os.pathsep.join(filter(None, [str(site), caches.environment().get("PYTHONPATH")]))
    return caches._replace(added={**caches.added, "PYTHONPATH": path})


def _beside_others(options: Options, workspace: Workspace) -> list[Row]:
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
