"""``aot``: all bundled ops at once, ahead of their use, beside DeepSpeed's of the same names."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from children import Workspace, ask, finish, timed
from measured import Bar, Failure, Row, Sample

from measure import Options

NAME = "aot"
IDLE_PERCENT = 15.0
AGAIN_MS = 500.0
SHARE = 1 / 5


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """The whole build, cold and again; how idle the cores were; the time for one op beside
    DeepSpeed's."""
    walls, idle, again = [], [], []
    built = 0
    try:
        for _ in range(options.times(3, 1)):
            with workspace.cold() as caches:
                trace = caches.root / "trace.json"
                command = [sys.executable, "-m", "opkiln", "build", "--all", "--target", "cpu"]
                walls.append(timed([*command, "--trace", str(trace)], caches))
                events = json.loads(trace.read_text())
                idle.append(idle_percent(events["traceEvents"]))
                said = json.loads(finish([*command, "--json"], caches).stdout)
                built = sum(each["status"] == "cached" for each in said["ops"])
                again += [timed(command, caches) * 1e3 for _ in range(options.times(5, 2))]
    except Failure as failure:
        return [Row(NAME, "opkiln", "all ops", None, str(failure))]
    mine = Sample(tuple(wall / built for wall in walls), "s")
    idled, repeated = Sample(tuple(idle), "%"), Sample(tuple(again), "ms")
    return [
        Row(NAME, "opkiln", f"all {built} ops for this CPU, cold", Sample(tuple(walls), "s")),
        Row(NAME, "opkiln", "cores idle until the last link", idled,
            bar=Bar(IDLE_PERCENT, idled.median, f"<= {IDLE_PERCENT:.0f} %")),
        Row(NAME, "opkiln", "the same again, nothing to do", repeated,
            bar=Bar(AGAIN_MS, repeated.median, f"<= {AGAIN_MS:.0f} ms")),
        Row(NAME, "opkiln", "time per op", mine),
        _deepspeed(options, workspace, mine),
    ]  # fmt: skip


def idle_percent(events: list[dict[str, Any]]) -> float:
    """The share of the cores that ran no step, from the first build's start to the last link's end.

    By the engine's own trace: a build is an event by its op's name, all others are its steps.
    """
    spans = [each for each in events if each["ph"] == "X"]
    begin = min(each["ts"] for each in spans)
    end = max(each["ts"] + each["dur"] for each in spans if each["name"] == "link")
    steps = [each for each in spans if each["name"] != each["cat"]]
    busy = sum(max(0.0, min(each["ts"] + each["dur"], end) - each["ts"]) for each in steps)
    cores = len(os.sched_getaffinity(0))
    return 100 * (1 - busy / (cores * (end - begin)))


def _deepspeed(options: Options, workspace: Workspace, mine: Sample) -> Row:
    """Its own builders' extensions through torch's BuildExtension, as its setup.py has them."""
    from opkiln.builder.registry import bundled_ops

    names = ["cpu_adam"] if options.quick else list(bundled_ops())
    try:
        with workspace.cold() as caches:
            answer = ask(["child_deepspeed_aot.py", str(caches.root / "out"), *names], caches)
    except Failure as failure:
        return Row(NAME, "DeepSpeed", "time per op", None, str(failure))
    ops = answer["ops"]
    theirs = Sample((answer["seconds"] / len(ops),), "s")
    ratio = mine.median / theirs.median
    return Row(
        NAME,
        "DeepSpeed",
        "time per op",
        theirs,
        f"{', '.join(ops)} in {answer['seconds']:.0f} s",
        ratio=ratio,
        bar=Bar(SHARE, ratio, "<= 1/5"),
        details={"ops": ops, "skipped": answer["skipped"]},
    )
