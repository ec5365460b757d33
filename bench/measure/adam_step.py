"""``adam-step``: one AdamW step of each system, in one process, at 28 bytes an element."""

from __future__ import annotations

from pathlib import Path

import streams
from children import Workspace, ask, finish
from measured import Failure, Row, Sample

from measure import Options

NAME = "adam-step"
BYTES = 28  # p, g, m, v read; p, m, v written; fp32
CASES = {"one": "one tensor, 64M fp32", "mixed": "600 tensors, 26.7M fp32"}
SYSTEMS = {
    "opkiln": "opkiln",
    "fused": "torch AdamW(fused)",
    "deepspeed": "DeepSpeed",
    "stream": "floor: plain loop",
}


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """The steps of both cases; the ratios are of times, the rates follow from the medians."""
    try:
        library = _stream_library(workspace)
    except Failure as failure:
        return [Row(NAME, SYSTEMS["stream"], "all", None, str(failure))]
    return [row for case in CASES for row in _case(case, library, options, workspace)]


def _stream_library(workspace: Workspace) -> Path:
    """The hand-written loop, compiled here."""
    output = workspace.root / "optimizer_streams.so"
    try:
        command = streams.compiling(output)
    except FileNotFoundError as error:
        raise Failure(str(error)) from error
    finish(command, workspace.warm)
    return output


def _case(case: str, library: Path, options: Options, workspace: Workspace) -> list[Row]:
    repeats = options.times(25, 7)
    try:
        script = ["child_adam.py", case, str(repeats), str(library)]
        answer = ask(script, workspace.warm)
    except Failure as failure:
        return [Row(NAME, "all", CASES[case], None, str(failure))]
    table = []
    times = answer["times"]
    mine = Sample(tuple(times["opkiln"]), "s").median if "opkiln" in times else None
    for system, who in SYSTEMS.items():
        if system in answer["failures"]:
            table.append(Row(NAME, who, CASES[case], None, answer["failures"][system]))
            continue
        sample = Sample(tuple(seconds * 1e3 for seconds in times[system]), "ms")
        rate = answer["elements"] * BYTES / sample.median / 1e6
        ratio = mine * 1e3 / sample.median if mine and system != "opkiln" else None
        table.append(
            Row(
                NAME,
                who,
                CASES[case],
                sample,
                f"{rate:.1f} GB/s",
                ratio=ratio,
                details={"gigabytes_per_second": rate, "threads": answer["threads"]},
            )
        )
    return table
