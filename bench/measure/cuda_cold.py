"""``cuda-cold``: the first use of a one-kernel CUDA op, with nothing cached, in fresh processes.

opkiln is measured twice: on a machine where it never was, so that its questions to nvcc and g++ are
in the time, and where it knows these compilers, as for every op after the first.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from children import Caches, Workspace, ask, load
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
KEPT = OPKILN[2]
SLOW = PEERS[2:]
# A peer's usual form against opkiln's first use, the harder of the two.
BARS = {"cuda_tvm_ffi": (1.0, "<= 1"), "cuda_cpp_extension": (1 / 8, "<= 1/8")}


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """One row for each variant, taking turns where there is more than one repeat."""
    cold_build.read_ahead()
    # Not measured: the compilers' own files come into memory, and opkiln learns who they are.
    by_hand(workspace)
    times: dict[Variant, list[float]] = {each: [] for each in (*OPKILN, FLOOR, *PEERS)}
    failures: dict[Variant, str] = {}
    # Those that take a minute are not built more often because the others are.
    wanted = {v: min(v.repeats, options.times(v.repeats, 1)) if v in SLOW else
              options.times(v.repeats, 1) for v in times}  # fmt: skip
    for turn in range(max(wanted.values())):
        for variant, taken in times.items():
            if variant in failures or turn >= wanted[variant]:
                continue
            try:
                taken.append(_once(variant, workspace, first=turn == 0 and workspace.fresh))
                said = f"{taken[-1]:.2f} s"
            except Failure as failure:
                said = failures[variant] = str(failure)
            print(f"bench:   {variant.who}, {variant.what}: {said}", file=sys.stderr, flush=True)
    samples = {variant: Sample(tuple(taken), "s") for variant, taken in times.items() if taken}
    return [_row(variant, samples, failures, workspace) for variant in times]


def _once(variant: Variant, workspace: Workspace, *, first: bool) -> float:
    if variant == FLOOR:
        return by_hand(workspace)
    # The warm caches know the compilers and hold no build of this peer yet; afterwards they serve
    # the measure of warm loads.
    if first and (variant == KEPT or variant in PEERS):
        return float(workspace.first_load(variant.peer)["load"])
    return _cold(variant, workspace)


def _cold(variant: Variant, workspace: Workspace, trace: Path | None = None) -> float:
    with workspace.cold() as caches:
        if variant.known:
            copy_memory(workspace.warm, caches)
        if trace is not None:
            added = {**caches.added, "OPKILN_TRACE": str(trace)}
            return float(load(variant.peer, caches._replace(added=added))["load"])
        return float(load(variant.peer, caches)["load"])


def by_hand(workspace: Workspace) -> float:
    """Wall seconds of the plan's own commands: the compiles side by side, then the link."""
    stage = Path(tempfile.mkdtemp(prefix="by-hand-", dir=workspace.root))
    try:
        return cold_build.run(ask(["child_plan.py", str(stage)], workspace.warm), stage)
    finally:
        shutil.rmtree(stage)


def copy_memory(known: Caches, caches: Caches) -> None:
    """What opkiln remembers of the compilers, without anything that it built."""
    store = Path(known.environment()["OPKILN_CACHE_DIR"])
    (memory,) = store.glob("*/toolchains")
    layout = Path(caches.environment()["OPKILN_CACHE_DIR"]) / memory.parent.name
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
        details = _traced(variant, workspace) if variant.peer == KEPT.peer else {}
        return Row(NAME, variant.who, variant.what, sample, details=details)
    ratios = {mine.what: samples[mine].median / sample.median for mine in OPKILN if mine in samples}
    ratio = ratios.get(KEPT.what if variant == FLOOR else OPKILN[0].what)
    bar = None
    if ratio is not None and variant.peer in BARS:
        limit, text = BARS[variant.peer]
        bar = Bar(limit, ratio, text)
    return Row(
        NAME, variant.who, variant.what, sample, ratio=ratio, bar=bar,
        details={"opkiln_ratios": ratios},
    )  # fmt: skip


def _traced(variant: Variant, workspace: Workspace) -> dict[str, Any]:
    """Where the time of one more build goes, in seconds from the call of ``load()``.

    ``build`` is from the plan to the published library; what is left of ``load`` are opkiln's
    questions to the compilers, where it has to ask, and the opening of the library.
    """
    trace = workspace.root / "trace.json"
    try:
        seconds = {"load": _cold(variant, workspace, trace)}
    except Failure as failure:
        return {"traced": str(failure)}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            name = "build" if event["name"] == "axpb" else event["name"]
            seconds[name] = event["dur"] / 1e6
    return {"traced_s": seconds}
