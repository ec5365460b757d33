"""This opkiln and the one of another environment, taking turns: what became faster, what slower.

    python bench/beside.py before=/path/to/another/environment/bin/python --out results.json

Every process is fresh; each opkiln has caches of its own. ``warm`` is the load of a built op beyond
``torch.ops.load_library`` of the same file. Only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import machine
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

    def prepare(self) -> list[str]:
        """Build every op for this CPU, and a wheel of one. Gives the names of the ops."""
        self.command(self.warm, "build", "--all", "--target", "cpu")
        out, site = self.wheel.root / "out", self.wheel.root / "site"
        self.command(self.warm, "build", COLD, "--target", "cpu", "--wheel", str(out))
        (wheel,) = out.glob("*.whl")
        pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--upgrade"]
        finish([self.python, *pip, "--target", str(site), str(wheel)], self.warm)
        self.wheel = self.wheel._replace(added={"PYTHONPATH": str(site)})
        names = (
            "import json; from opkiln.registry import bundled; print(json.dumps(list(bundled())))"
        )
        found: list[str] = json.loads(finish([self.python, "-c", names], self.warm).stdout)
        for op in found:  # once untimed: bytecode written, pages cached
            self.paths[op] = self.child(self.warm, op)["path"]
        self.paths["prebuilt"] = self.child(self.wheel, COLD)["path"]
        if not self.paths["prebuilt"].startswith(str(site)):
            raise Failure(f"{self.name}: {COLD} was not loaded from the wheel")
        return found

    def child(self, caches: Caches, what: str) -> dict[str, Any]:
        return ask(["child_catalogue.py", what], caches, python=self.python)

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
    parser.add_argument("--ops", nargs="*", help="load these ops only")
    parser.add_argument("--keep", type=Path, help="build here, and find it again the next time")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    return parser.parse_args()


def measure(subjects: list[Subject], asked: argparse.Namespace, workspace: Workspace) -> None:
    """Everything, the subjects taking turns. Raises Failure."""
    ops = min((subject.prepare() for subject in subjects), key=len)
    for _ in range(asked.repeats):
        for subject in subjects:
            subject.note(
                "import", ask(["child_import.py"], subject.warm, python=subject.python)["import"]
            )
            for op in asked.ops or ops:
                subject.beyond(f"warm {op}", op, subject.warm, subject.paths[op])
            subject.beyond(f"prebuilt {COLD}", COLD, subject.wheel, subject.paths["prebuilt"])
            subject.note("report", subject.command(subject.warm, "report"))
            subject.note("build again", subject.command(subject.warm, "build", COLD))
    for _ in range(asked.cold):
        for subject in subjects:
            with workspace.cold() as caches:
                subject.note(f"cold {COLD}", subject.child(caches, COLD)["load"])


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
    rows = [
        {
            "what": what,
            "median_ms": {each.name: round(median(each.times[what]), 3) for each in subjects},
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
    print(f"{'':24}{other.name:>10}{here.name:>10}{'ratio':>8}")
    for what, taken in here.times.items():
        old, new = median(other.times[what]), median(taken)
        print(f"{what:24}{old:10.2f}{new:10.2f}{new / old:8.2f}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
