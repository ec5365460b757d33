"""This opkiln and the one of another environment, taking turns: what became faster, what slower.

    python bench/beside.py before=/path/to/another/environment/bin/python --out results.json

Every process is fresh; each opkiln has caches of its own. ``warm`` is the load of a built op beyond
``torch.ops.load_library`` of the same file; ``drop-in`` is a script that calls torch's ``load()``
under ``opkiln run``, cold and in a fresh process after that. Only ratios of one run mean anything;
beside each is the interval that holds it in 95% of 2,000 samples drawn from the pairs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import median
from typing import Any

import machine
from calls import FUNCTION, OVERLOAD
from children import Caches, Workspace, ask, finish, timed
from measured import Failure

HERE = "now"
COLD = "cpu_adam"


class Subject:
    """One environment: its Python, its caches and its times in milliseconds."""

    def __init__(self, name: str, python: str, root: Path) -> None:
        self.name, self.python = name, python
        self.warm = Caches(root / name)
        self.wheel = Caches(root / f"{name}-wheel")
        self.times: dict[str, list[float]] = {}
        self.paths: dict[str, str] = {}

    def prepare(self, ops: list[str]) -> None:
        """Build the ops for this CPU, and a wheel of one."""
        self.command(self.warm, "build", *ops, "--target", "cpu")
        out, site = self.wheel.root / "out", self.wheel.root / "site"
        self.command(self.warm, "build", COLD, "--target", "cpu", "--wheel", str(out))
        (wheel,) = out.glob("*.whl")
        pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--upgrade"]
        finish([self.python, *pip, "--target", str(site), str(wheel)], self.warm)
        self.wheel = self.wheel._replace(added={"PYTHONPATH": str(site)})
        for op in ops:  # once untimed: bytecode written, pages cached
            self.paths[op] = self.child(self.warm, op)["path"]
        self.drop_in(self.warm)
        self.paths["prebuilt"] = self.child(self.wheel, COLD)["path"]
        if not self.paths["prebuilt"].startswith(str(site)):
            raise Failure(f"{self.name}: {COLD} was not loaded from the wheel")

    def child(self, caches: Caches, what: str) -> dict[str, Any]:
        return ask(["child_catalogue.py", what], caches, python=self.python)

    def calls(self) -> None:
        """A thousand calls of a small op, by two ways."""
        least = ask(["child_calls.py", "10"], self.warm, python=self.python)
        for way in (FUNCTION, OVERLOAD):
            self.note(f"1000 calls, {way}", least[way]["cpu"] / 1e6)

    def drop_in(self, caches: Caches) -> float:
        """Seconds in which an unmodified script loads an extension by torch's function."""
        run = (self.python, "-m", "opkiln", "run")
        found = ask(["child_load.py", "cpp_extension"], caches, prefix=run, python=self.python)
        return float(found["load"])

    def command(self, caches: Caches, *words: str) -> float:
        """Seconds of an opkiln command."""
        return timed([self.python, "-m", "opkiln", *words], caches)

    def beyond(self, name: str, op: str, caches: Caches, path: str) -> None:
        """One load of an op, and one of its bare library."""
        mine = self.child(caches, op)["load"]
        bare = self.child(caches, path)["load"]
        self.note(name, mine - bare)

    def note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds * 1000)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", metavar="NAME=PYTHON", help="the environment to compare with")
    parser.add_argument("--repeats", type=int, default=15, help="of each load and command")
    parser.add_argument("--cold", type=int, default=3, help="first builds of each")
    parser.add_argument("--drop-in", type=int, default=2, help="first builds by torch's load()")
    parser.add_argument("--ops", nargs="+", default=[COLD, "packbits"], help="load these ops")
    parser.add_argument("--keep", type=Path, help="build here, and find it again the next time")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    return parser.parse_args()


def measure(subjects: list[Subject], asked: argparse.Namespace, workspace: Workspace) -> None:
    """Everything, the subjects taking turns. Raises Failure."""
    for subject in subjects:
        subject.prepare(asked.ops)
    for _ in range(asked.repeats):
        for subject in subjects:
            subject.note(
                "import", ask(["child_import.py"], subject.warm, python=subject.python)["import"]
            )
            for op in asked.ops:
                subject.beyond(f"warm {op}", op, subject.warm, subject.paths[op])
            subject.beyond(f"prebuilt {COLD}", COLD, subject.wheel, subject.paths["prebuilt"])
            subject.note("report", subject.command(subject.warm, "report"))
            subject.note("build again", subject.command(subject.warm, "build", COLD))
            subject.note("drop-in, again", subject.drop_in(subject.warm))
            subject.calls()
    for _ in range(asked.cold):
        for subject in subjects:
            with workspace.cold() as caches:
                subject.note(f"cold {COLD}", subject.child(caches, COLD)["load"])
    for _ in range(asked.drop_in):
        for subject in subjects:
            with workspace.cold() as caches:
                subject.note("drop-in, cold", subject.drop_in(caches))


def interval(before: list[float], after: list[float]) -> list[float]:
    """Between which two numbers the ratio of the medians lies."""
    draw = random.Random(0)
    ratios = []
    for _ in range(2000):
        pairs = draw.choices(list(zip(before, after, strict=True)), k=len(after))
        ratios.append(median(new for _, new in pairs) / median(old for old, _ in pairs))
    ratios.sort()
    return [round(ratios[50], 3), round(ratios[-51], 3)]


def main() -> int:
    """Build, measure, print and store; 1 if something could not be measured."""
    asked = arguments()
    workspace = Workspace(asked.keep)
    name, _, python = asked.other.partition("=")
    subjects = [
        Subject(name, python, workspace.root),
        Subject(HERE, sys.executable, workspace.root),
    ]
    load = [machine.load_average()]
    try:
        measure(subjects, asked, workspace)
    except Failure as failure:
        print(f"beside: {failure}", file=sys.stderr)
        return 1
    finally:
        workspace.close()
    load.append(machine.load_average())
    other, here = subjects
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "median_ms": {each.name: round(median(each.times[what]), 3) for each in subjects},
            "ratio": round(median(here.times[what]) / median(other.times[what]), 3),
            "interval": interval(other.times[what], here.times[what]),
            "values_ms": {each.name: [round(v, 3) for v in each.times[what]] for each in subjects},
        }
        for what in here.times
    ]
    result = {
        **machine.described(),
        "load_average": [round(each, 2) for each in load],
        "rows": rows,
    }
    print(machine.heading(result))
    print(f"load average {result['load_average']}; medians in ms")
    print(f"{'':40}{other.name:>10}{here.name:>10}{'ratio':>8}  95%")
    for row in rows:
        old, new = (row["median_ms"][each.name] for each in subjects)
        low, high = row["interval"]
        print(f"{row['what']:40}{old:10.2f}{new:10.2f}{row['ratio']:8.2f}  {low:.2f} to {high:.2f}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
