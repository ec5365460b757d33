"""An unmodified script that imports ``torch.utils.cpp_extension`` and calls ``load()``, warm.

    python bench/run_script.py --out results.json
    python bench/run_script.py --beside before=/path/to/another/environment/bin/python

Each system runs the same script in fresh processes that take turns: torch alone, and ``opkiln run``
of this environment and of those that ``--beside`` names. ``script`` is the time for the import of
torch's module and for ``load()``, after ``import torch``; ``cpu`` is the CPU time of the same, with
that of the programs it starts; ``command`` is the whole command. The source is either fresh, saved
right before the first build, or settled, a few seconds old. Only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import machine
from children import ANSWER, Caches, Workspace, finish
from measured import Failure

SETTLED = 3.0  # seconds; opkiln believes a file's times after two
# A module without torch's headers: it compiles in a moment, and a warm load is the same.
SOURCE = """\
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_small() { return PyModule_Create(&definition); }
"""
SCRIPT = """\
import json, resource, time
import torch
def cpu():
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
before, begin = cpu(), time.perf_counter()
from torch.utils.cpp_extension import load
imported = time.perf_counter()
module = load(name="small", sources=["small.cpp"])
loaded, after = time.perf_counter(), cpu()
assert module.answer() == 42
times = {"import": imported - begin, "load": loaded - imported, "cpu": after - before}
print("ANSWER" + json.dumps(times))
""".replace("ANSWER", ANSWER)
SAVE = "import os; os.utime('small.cpp')\n"  # as an editor does, at the last moment
TORCH, OPKILN = "torch", "opkiln run"
TIMES = ("script", "import", "load", "cpu", "command")


class Subject:
    """One system with one source: its command, its directory and its times in milliseconds."""

    def __init__(self, who: str, command: list[str], age: str, caches: Caches) -> None:
        self.who, self.age, self.caches = who, age, caches
        self.directory = caches.root / "project"
        self._python = command
        self.times: dict[str, list[float]] = {name: [] for name in TIMES}

    def build(self) -> None:
        """The first run, which compiles."""
        fresh = self.age == "fresh"
        self.directory.mkdir(parents=True)
        (self.directory / "script.py").write_text(SCRIPT)
        first = SCRIPT.replace("module = load", f"{SAVE}module = load") if fresh else SCRIPT
        (self.directory / "first.py").write_text(first)
        (self.directory / "small.cpp").write_text(SOURCE)
        if not fresh:
            time.sleep(SETTLED)
        finish([*self._python, "first.py"], self.caches, cwd=self.directory)

    def run(self) -> None:
        """One warm run."""
        begin = time.perf_counter()
        done = finish([*self._python, "script.py"], self.caches, cwd=self.directory)
        whole = time.perf_counter() - begin
        lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
        answer: dict[str, float] = json.loads(lines[-1].removeprefix(ANSWER))
        found = {**answer, "script": answer["import"] + answer["load"], "command": whole}
        for name, seconds in found.items():
            self.times[name].append(seconds * 1000)

    def as_json(self) -> dict[str, Any]:
        return {
            "who": self.who,
            "source": self.age,
            "median_ms": {name: round(median(all_), 2) for name, all_ in self.times.items()},
            "values_ms": {name: [round(v, 3) for v in all_] for name, all_ in self.times.items()},
        }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="warm runs of each")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    parser.add_argument(
        "--beside", action="append", default=[], metavar="NAME=PYTHON",
        help="also measure the opkiln of this environment; repeatable",
    )  # fmt: skip
    return parser.parse_args()


def subjects(beside: list[str], workspace: Workspace) -> list[Subject]:
    """Every system with every source."""
    run = ["-m", "opkiln", "run"]
    systems = {
        TORCH: [sys.executable],
        OPKILN: [sys.executable, *run, sys.executable],
    }
    for each in beside:
        name, _, python = each.partition("=")
        systems[f"{OPKILN}, {name}"] = [python, *run, python]
    return [
        Subject(who, command, age, workspace.warm._replace(root=workspace.root / f"{place}-{age}"))
        for age in ("fresh", "settled")
        for place, (who, command) in enumerate(systems.items())
    ]


def ratios(found: list[Subject]) -> dict[str, dict[str, float]]:
    """The medians of each over torch's, with the same source: under 1, it takes less."""
    made = {}
    for subject in found:
        torchs = next(each for each in found if (each.who, each.age) == (TORCH, subject.age))
        if subject is not torchs:
            made[f"{subject.who}, {subject.age} source"] = {
                name: round(median(subject.times[name]) / median(torchs.times[name]), 3)
                for name in ("script", "cpu", "command")
            }
    return made


def main() -> int:
    """Build, measure, print and store; 1 if something could not be measured."""
    asked = arguments()
    workspace = Workspace()
    load = [machine.load_average()]
    try:
        found = subjects(asked.beside, workspace)
        for subject in found:
            subject.build()
        for _ in range(asked.repeats):
            for subject in found:
                subject.run()
    except Failure as failure:
        print(f"run_script: {failure}", file=sys.stderr)
        return 1
    finally:
        workspace.close()
    load.append(machine.load_average())
    result = {
        **machine.described(),
        "repeats": asked.repeats,
        "load_average": [round(each, 2) for each in load],
        "rows": [each.as_json() for each in found],
        "over_torch": ratios(found),
    }
    print(machine.heading(result))
    print(f"{asked.repeats} repeats, load average {result['load_average']}; medians in ms")
    for subject in found:
        shown = (f"{name} {median(values):7.1f}" for name, values in subject.times.items())
        print(f"{subject.who:24} {subject.age:8} {'  '.join(shown)}")
    for who, ratio in result["over_torch"].items():
        shown = (f"{name} {value:.2f}" for name, value in ratio.items())
        print(f"{who} over torch: {', '.join(shown)}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
