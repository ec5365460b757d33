"""What a hit costs beside ``torch.ops.load_library``: this opkiln, and those of other environments.

    python bench/hits.py [NAME=PYTHON ...] [--repeats 15] [--out bench/results/hits.json]

Two extensions, one on torch's stable ABI and one on the whole of its C++ API, are built and then
loaded in fresh processes that have torch, everybody taking turns. Milliseconds are medians; only
the ratios of one run mean anything. The system calls are those of one load under strace.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import machine
from children import Caches, Workspace, ask
from strace import traced

SOURCES = {
    "stable ABI": ("torch-stable", "#include <torch/csrc/stable/library.h>\n"),
    "whole C++ API": ("torch", "#include <torch/extension.h>\n"),
}
LIBRARY = "TORCH_LIBRARY_FRAGMENT(bench_hit, m) {}\n"
STABLE = "STABLE_TORCH_LIBRARY_FRAGMENT(bench_hit, m) {}\n"


class Subject:
    """An environment and the extensions that it has built."""

    def __init__(self, name: str, python: str, workspace: Workspace) -> None:
        self.name, self.python = name, python
        self.caches = Caches(workspace.root / name)
        self.sources: dict[str, str] = {}
        self.paths: dict[str, str] = {}
        for kind, (abi, text) in SOURCES.items():
            source = workspace.root / name / "sources" / f"{abi}.cpp"
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text + (STABLE if abi == "torch-stable" else LIBRARY))
            self.sources[kind] = str(source)
            for _ in range(2):  # the second finds what the first has written down
                self.paths[kind] = self.load(kind)["path"]

    def load(self, kind: str) -> dict[str, Any]:
        return self.ask(self.sources[kind], SOURCES[kind][0])

    def ask(self, *words: str) -> dict[str, Any]:
        return ask(["child_hit.py", *words], self.caches, python=self.python)

    def measure(self, kind: str, repeats: int) -> dict[str, Any]:
        """Ratios come from loads that take turns."""
        loads, bare = [], []
        for _ in range(repeats):
            loads.append(self.load(kind))
            bare.append(self.ask(self.paths[kind])["load"])
        script = ["child_hit.py", self.sources[kind], SOURCES[kind][0]]
        calls = traced(script, self.caches, self.python)["load"]
        return {
            "who": self.name,
            "what": kind,
            "load_ms": round(median(each["load"] for each in loads) * 1e3, 2),
            "load_library_ms": round(median(bare) * 1e3, 2),
            "modules": loads[-1]["modules"],
            "system_calls": calls.total,
            "stats": calls.kinds["stats"],
            "opens": calls.kinds["opens"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("others", nargs="*", metavar="NAME=PYTHON")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    workspace = Workspace()
    named = [each.partition("=")[::2] for each in options.others]
    subjects = [Subject(*each, workspace) for each in [("now", sys.executable), *named]]
    rows = [each.measure(kind, options.repeats) for kind in SOURCES for each in subjects]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.out:
        found = {"machine": machine.described(), "rows": rows}
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
