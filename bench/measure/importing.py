"""``import``: what ``import opkiln`` costs in a fresh process, and what it brings and does."""

from __future__ import annotations

from children import Workspace, ask
from measured import Bar, Failure, Row, Sample
from strace import traced

from measure import Options

NAME = "import"
LIMIT_MS = 15.0


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """The time, the foreign modules, and the files and processes that a trace shows."""
    return [*_time(options, workspace), *_effects(workspace)]


def _time(options: Options, workspace: Workspace) -> list[Row]:
    script = ["child_import.py"]
    try:
        ask(script, workspace.warm)  # writes the bytecode
        answers = [ask(script, workspace.warm) for _ in range(options.times(15, 5))]
    except Failure as failure:
        return [Row(NAME, "opkiln", "import opkiln", None, str(failure))]
    sample = Sample(tuple(answer["import"] * 1e3 for answer in answers), "ms")
    modules, foreign = answers[0]["modules"], answers[0]["foreign"]
    return [
        Row(
            NAME,
            "opkiln",
            "import opkiln",
            sample,
            bar=Bar(LIMIT_MS, sample.median, f"<= {LIMIT_MS:.0f} ms"),
            details={"modules": modules},
        ),
        Row(
            NAME,
            "opkiln",
            "modules neither its own nor Python's",
            Sample((float(len(foreign)),), "count"),
            ", ".join(foreign) or f"of {len(modules)} modules",
            bar=Bar(0, len(foreign), "none"),
        ),
    ]


def _effects(workspace: Workspace) -> list[Row]:
    what = "files made, processes started"
    try:
        calls = traced(["child_import.py"], workspace.warm)["import"]
    except Failure as failure:
        return [Row(NAME, "opkiln", what, None, str(failure))]
    effects = calls.kinds["files made"] + calls.kinds["writes"] + calls.kinds["processes"]
    return [
        Row(
            NAME,
            "opkiln",
            what,
            Sample((float(effects),), "count"),
            f"{calls.total} system calls: {calls.described()}",
            bar=Bar(0, effects, "none"),
            details={"calls": dict(calls.names)},
        )
    ]
