"""``cuda-cold``: the first use of a one-kernel CUDA op, with nothing cached, in fresh processes.

opkiln is measured twice: on a machine where it never was, so that its questions to nvcc and g++ are
in the time, and where it knows these compilers, as for every op after the first.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from children import Caches, Workspace, ask
from measured import Bar, Failure, Row, Sample

from measure import Options, cold_build

NAME = "cuda-cold"
FIRST, KNOWN = "first use of opkiln", "compilers known"


class Variant(NamedTuple):
    """A peer and how it reads in the table; ``known``: with opkiln's memory of the compilers."""

    peer: str
    who: str
    what: str
    repeats: int
    known: bool = False


OPKILN = (
    Variant("cuda_opkiln_builder", "opkiln", f"builder class, {FIRST}", 5),
    Variant("cuda_opkiln_load", "opkiln", f"load(), {FIRST}", 3),
    Variant("cuda_opkiln_builder", "opkiln", f"builder class, {KNOWN}", 5, known=True),
    Variant("cuda_opkiln_load", "opkiln", f"load(), {KNOWN}", 3, known=True),
)
FLOOR = Variant("by_hand", "floor: by hand", "the same commands", 5)
PEERS = (
    Variant("cuda_tvm_ffi", "tvm-ffi", "load_inline", 5),
    Variant("cuda_tvm_ffi_apart", "tvm-ffi", "load, kernel apart", 3),
    Variant("cuda_cpp_extension", "torch cpp_extension", "load_inline", 2),
    Variant("cuda_cpp_extension_apart", "torch cpp_extension", "load_inline, kernel apart", 1),
)
# A peer's usual form against opkiln's first use, which asks the most of opkiln.
BARS = {"cuda_tvm_ffi": (1.0, "<= 1"), "cuda_cpp_extension": (1 / 8, "<= 1/8")}
AGAINST = OPKILN[0]


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """One row for each variant, taking turns where there is more than one repeat."""
    cold_build.read_ahead()
    # Not measured: the compilers' own files come into memory, and opkiln learns who they are.
    by_hand(workspace)
    times: dict[Variant, list[float]] = {each: [] for each in (*OPKILN, FLOOR, *PEERS)}
    failures: dict[Variant, str] = {}
    # A build that takes a minute is not repeated more often because the others are.
    wanted = {v: v.repeats if v.repeats <= 2 else options.times(v.repeats, 1) for v in times}
    if options.quick:
        wanted |= dict.fromkeys(PEERS[2:], 1)
    for turn in range(max(wanted.values())):
        for variant, taken in times.items():
            if variant in failures or turn >= wanted[variant]:
                continue
            try:
                taken.append(_once(variant, workspace))
            except Failure as failure:
                failures[variant] = str(failure)
    samples = {variant: Sample(tuple(taken), "s") for variant, taken in times.items() if taken}
    return [_row(variant, samples, failures, workspace) for variant in times]


def _once(variant: Variant, workspace: Workspace) -> float:
    if variant == FLOOR:
        return by_hand(workspace)

    def knowing(caches: Caches) -> None:
        _copy_memory(workspace.warm, caches)

    answer = workspace.cold_load(variant.peer, knowing if variant.known else None)
    return float(answer["load"])


def by_hand(workspace: Workspace) -> float:
    """Wall seconds of the plan's own commands: the compiles side by side, then the link."""
    stage = Path(tempfile.mkdtemp(prefix="by-hand-", dir=workspace.root))
    try:
        return cold_build.run(ask(["child_plan.py", str(stage)], workspace.warm), stage)
    finally:
        shutil.rmtree(stage)


def _copy_memory(known: Caches, caches: Caches) -> None:
    """What opkiln remembers of the compilers, without anything that it built."""
    store = Path(known.environment()["OPKILN_CACHE_DIR"])
    target = Path(caches.environment()["OPKILN_CACHE_DIR"])
    (memory,) = store.glob("*/toolchains")
    layout = target / memory.parent.name
    layout.mkdir(mode=0o700)
    shutil.copytree(memory, layout / memory.name)


def _row(
    variant: Variant,
    samples: dict[Variant, Sample],
    failures: dict[Variant, str],
    workspace: Workspace,
) -> Row:
    if variant in failures:
        return Row(NAME, variant.who, variant.what, None, failures[variant])
    sample = samples[variant]
    if variant in OPKILN:
        details = {"steps_ms": _steps(variant, workspace)}
        return Row(NAME, variant.who, variant.what, sample, details=details)
    ratios = {
        mine.what: samples[mine].median / sample.median for mine in OPKILN if mine in samples
    }
    against = OPKILN[2] if variant == FLOOR else AGAINST
    ratio = ratios.get(against.what)
    bar = None
    if ratio is not None and variant.peer in BARS:
        limit, text = BARS[variant.peer]
        bar = Bar(limit, ratio, text)
    return Row(
        NAME, variant.who, variant.what, sample, ratio=ratio, bar=bar,
        details={"opkiln_ratios": ratios},
    )  # fmt: skip


def _steps(variant: Variant, workspace: Workspace) -> dict[str, float]:
    """How long each step took in one more, traced, build; ``axpb`` is all of it but the probes."""
    trace = workspace.root / "trace.json"

    def traced(caches: Caches) -> Caches: ...

    return {}
