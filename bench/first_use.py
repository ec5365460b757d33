"""The first use of an op, from nothing built to a checked result, beside the peers; one run.

    python bench/first_use.py cpu --out bench/results/first_use.json
    python bench/first_use.py cuda --out bench/results/first_use_cuda.json   # also without a GPU

Every use is a fresh process that has torch, with no build of the op in any cache; the systems take
turns. ``warm machine`` is a machine where opkiln has built something before: it knows the compilers
and has its observer. ``very first`` is one where it never was. ``again`` is the next process, with
what each system kept. Wall seconds, and CPU seconds beside them: those stay the same on a machine
where others are at work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import cuda_cold
import machine
import table
from children import Caches, Workspace, ask
from measure.cold_build import read_ahead
from measure.cuda_cold import copy_memory
from measured import Bar, Failure, Row, Sample

NAME = {"cpu": "first-use", "cuda": "first-use-cuda"}


class Variant(NamedTuple):
    """A peer and how it reads in the table."""

    peer: str
    who: str
    what: str
    known: bool = False  # with opkiln's memory of the machine
    added: Mapping[str, str] = MappingProxyType({})  # to the environment
    limit: float | None = None  # the bar on its median, in seconds
    times: float | None = None  # the bar on its median over that of opkiln's first variant


_NVRTC, _NVCC = {"OPKILN_CUDA": "nvrtc"}, {"OPKILN_CUDA": "nvcc"}
CPU = (
    Variant("opkiln_decorated", "opkiln", "decorator, warm machine", known=True, limit=0.7),
    Variant("opkiln_decorated", "opkiln", "decorator, very first", limit=1.5),
    Variant("tvm_ffi_inline", "tvm-ffi", "load_inline", times=2),
    Variant("tvm_ffi_file", "tvm-ffi", "load"),
    Variant("cpp_extension_inline", "torch cpp_extension", "load_inline", times=30),
)
CUDA = (
    Variant("cuda_opkiln_decorated", "opkiln", "NVRTC, warm machine", True, _NVRTC, limit=1.0),
    Variant("cuda_opkiln_decorated", "opkiln", "nvcc, warm machine", True, _NVCC, limit=1.9),
    Variant("cuda_opkiln_decorated", "opkiln", "NVRTC, very first", False, _NVRTC),
    Variant("cuda_opkiln_decorated", "opkiln", "nvcc, very first", False, _NVCC),
    Variant("cuda_tvm_ffi", "tvm-ffi", "load_inline"),
    Variant("cuda_tvm_ffi_apart", "tvm-ffi", "load, kernel apart"),
    Variant("cuda_cpp_extension", "torch cpp_extension", "load_inline"),
)
VARIANTS = {"cpu": CPU, "cuda": CUDA}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("device", choices=tuple(VARIANTS))
    parser.add_argument("--repeats", type=int, default=5, help="of each (default: 5)")
    parser.add_argument("--only", help="variants whose name has this: opkiln, tvm, torch")
    parser.add_argument("--arch", help="what CUDA is compiled for, such as 9.0a")
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    return parser.parse_args()


class Uses:
    """What the uses of one variant took, in seconds."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.again: list[float] = []
        self.failure = ""

    def prepare(self, workspace: Workspace) -> Caches:
        """Caches in which this variant was used once: its memory of the machine is copied."""
        name = "-".join(["known", *self.variant.added.values()])
        known = workspace.warm._replace(root=workspace.root / name)
        known = self._with_variables(known)
        if not known.root.exists():
            ask(["child_first_use.py", self.variant.peer], known)
        return known

    def once(self, workspace: Workspace) -> None:
        """One first use, and the use in the next process. Raises Failure."""
        with workspace.cold() as cold:
            caches = self._with_variables(cold)
            if self.variant.known:
                copy_memory(self.prepare(workspace), caches)
            answer = ask(["child_first_use.py", self.variant.peer], caches)
            self.wall.append(answer["wall"])
            self.cpu.append(answer["cpu"])
            self.again.append(ask(["child_first_use.py", self.variant.peer], caches)["wall"])

    def _with_variables(self, caches: Caches) -> Caches:
        return caches._replace(added={**caches.added, **self.variant.added})

    def row(self, device: str, first: Uses | None, judged: bool) -> Row:
        """Its line of the table; ``first`` is what ratios are taken against."""
        variant = self.variant
        if not self.wall:
            return Row(NAME[device], variant.who, variant.what, None, self.failure)
        sample = Sample(tuple(self.wall), "s")
        ratio = None
        if first is not None and first.wall and variant.who != "opkiln":
            ratio = Sample(tuple(first.wall), "s").median / sample.median
        bar = None
        if variant.limit is not None and judged:
            bar = Bar(variant.limit, sample.median, f"<= {variant.limit} s")
        elif variant.times is not None and ratio is not None:
            bar = Bar(1 / variant.times, ratio, f"<= 1/{variant.times:g}")
        details = {
            "cpu_median_s": Sample(tuple(self.cpu), "s").median,
            "cpu_values_s": self.cpu,
            "again_median_s": Sample(tuple(self.again), "s").median,
            "again_values_s": self.again,
        }
        return Row(
            NAME[device], variant.who, variant.what, sample, self.failure, ratio, bar, details
        )


def measured(variants: list[Variant], repeats: int, workspace: Workspace) -> list[Uses]:
    """Every variant in its turn."""
    found = [Uses(variant) for variant in variants]
    read_ahead()
    for turn in range(repeats):
        for uses in found:
            if uses.failure:
                continue
            try:
                uses.once(workspace)
                said = f"{uses.wall[-1]:.2f} s, CPU {uses.cpu[-1]:.2f} s"
            except Failure as failure:
                said = uses.failure = str(failure)
            name = f"{uses.variant.who}, {uses.variant.what}"
            print(f"bench: {turn + 1}/{repeats} {name}: {said}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Measure, print, store; 1 when a bar was missed or opkiln could not be measured."""
    asked = arguments()
    head, added, judged = machine.described(), {"BENCH_GPU": "0"}, True
    head["commit"] = asked.commit or head["commit"]
    if asked.device == "cuda":
        try:
            home, nvcc = cuda_cold.toolkit()
        except Failure as failure:
            print(f"bench: {failure}", file=sys.stderr)
            return 1
        gpus = cuda_cold.gpus()
        arch = asked.arch or cuda_cold.architecture(gpus)
        head = cuda_cold.described(gpus, nvcc, arch, head["commit"])
        added = cuda_cold.environment(home, arch, bool(gpus))
        judged = bool(gpus)  # the bars are those of the machine with the GPU
    variants = [each for each in VARIANTS[asked.device] if not asked.only or asked.only in each.who]
    before = machine.load_average()
    workspace = Workspace(added=added)
    try:
        found = measured(variants, asked.repeats, workspace)
    finally:
        workspace.close()
    head["load_average"] = {"before": before, "after": machine.load_average()}
    first = next((uses for uses in found if uses.variant == VARIANTS[asked.device][0]), None)
    rows = [uses.row(asked.device, first, judged) for uses in found]
    show(head, rows)
    if asked.out:
        table.store(asked.out, head, rows)
    missed = [row for row in rows if row.bar is not None and not row.bar.met]
    broken = [row for row in rows if row.sample is None and row.who == "opkiln"]
    return 1 if missed or broken else 0


def show(head: dict[str, Any], rows: list[Row]) -> None:
    """The table, and the CPU seconds below it."""
    print(machine.heading(head))
    print("load average before {before:.2f}, after {after:.2f}\n".format(**head["load_average"]))
    print(table.render(rows))
    for row in rows:
        if row.details:
            cpu, again = row.details["cpu_median_s"], row.details["again_median_s"]
            print(f"{row.who}, {row.what}: CPU {cpu:.2f} s; again {again * 1000:.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
