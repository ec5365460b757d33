"""What a call of a small op costs on the CPU, in nanoseconds.

    python bench/calls.py --out bench/results/calls.json

One kernel, ``x + y`` of eight floats, reached in several ways. Each process (``--repeats``) builds
nothing, times the ways in turn, many short rounds of each, and takes the least of a way's rounds;
the figures are medians over the processes. Time is the CPU time of the thread, so that other work
on the machine counts less; the least wall time is beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import machine
import table
from children import Workspace, ask
from measured import Bar, Failure, Row, Sample

NAME = "calls"
FUNCTION, OVERLOAD = "decorated function", "its OpOverload, no gradient"
PLAIN, TRAINED = "op without a gradient, builder class", "default overload, no gradient needed"
WAYS = (
    FUNCTION, OVERLOAD, PLAIN, TRAINED, "decorated function, gradient needed",
    "torch.library.custom_op", "custom_op with register_autograd", "torch.add",
)  # fmt: skip
# How much more the decorated function may take, in nanoseconds.
BARS = (
    ("the function above its OpOverload", OVERLOAD, 300.0),
    ("an op with a gradient above one without", PLAIN, 1000.0),
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="processes (default: 7)")
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    return parser.parse_args()


def rows_of(answers: list[dict[str, Any]]) -> list[Row]:
    """A line for each way, and one for each bar, on the difference of two ways."""
    cpu = {way: tuple(answer[way]["cpu"] for answer in answers) for way in WAYS}
    rows = [
        Row(
            NAME, "torch" if "torch" in way or "custom_op" in way else "opkiln", way,
            Sample(cpu[way], "ns"), details={"wall_ns": [each[way]["wall"] for each in answers]},
        )
        for way in WAYS
    ]  # fmt: skip
    for name, over, limit in BARS:
        above = tuple(mine - its for mine, its in zip(cpu[FUNCTION], cpu[over], strict=True))
        sample = Sample(above, "ns")
        bar = Bar(limit, sample.median, f"<= {limit:.0f} ns")
        rows.append(Row(NAME, "opkiln", name, sample, bar=bar))
    return rows


def main() -> int:
    """Measure, print, store; 1 when a bar was missed."""
    asked = arguments()
    head = machine.described()
    head["commit"] = asked.commit or head["commit"]
    before = machine.load_average()
    workspace = Workspace()
    try:
        ask(["child_calls.py", "0"], workspace.warm)  # builds both ops
        answers = [ask(["child_calls.py", "60"], workspace.warm) for _ in range(asked.repeats)]
    except Failure as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    finally:
        workspace.close()
    head["load_average"] = {"before": before, "after": machine.load_average()}
    rows = rows_of(answers)
    return table.finish(head, rows, asked.out)


if __name__ == "__main__":
    sys.exit(main())
