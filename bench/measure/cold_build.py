"""``cold-build``: the first use of an op, with nothing cached, in fresh processes.

The first load of each system fills the caches that the warm measures use, and counts here as its
first repeat; the slow ones have no second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from children import Workspace, finish
from measured import Failure, Row, Sample

from measure import Options

NAME = "cold-build"


class Variant(NamedTuple):
    """A peer, how it reads in the table, how often it is built, and opkiln's counterpart."""

    peer: str
    who: str
    what: str
    repeats: int
    against: str = ""


VARIANTS = (
    Variant("opkiln_cpu_adam", "opkiln", "cpu_adam", 3),
    Variant("by_hand", "floor: by hand", "cpu_adam, the same commands", 3, "opkiln_cpu_adam"),
    Variant("deepspeed_cpu_adam", "DeepSpeed", "cpu_adam", 1, "opkiln_cpu_adam"),
    Variant("opkiln_stable", "opkiln", "one line, stable ABI", 3),
    Variant("opkiln_plain", "opkiln", "one line, no torch", 3),
    Variant("tvm_ffi_inline", "tvm-ffi", "one line", 3, "opkiln_stable"),
    Variant("cpp_extension", "torch cpp_extension", "one line", 1, "opkiln_stable"),
)


def rows(options: Options, workspace: Workspace) -> list[Row]:
    """One row for each variant, taking turns where there is more than one repeat."""
    read_ahead()
    failures: dict[str, str] = {}
    times: dict[str, list[float]] = {variant.peer: [] for variant in VARIANTS}
    # Those that take a minute are built once, however often the others are.
    wanted = {v.peer: 1 if v.repeats == 1 else options.times(v.repeats, 1) for v in VARIANTS}
    for turn in range(max(wanted.values())):
        for variant in VARIANTS:
            if variant.peer in failures or turn >= wanted[variant.peer]:
                continue
            try:
                times[variant.peer].append(
                    _once(variant.peer, workspace, first=turn == 0 and workspace.fresh)
                )
            except Failure as failure:
                failures[variant.peer] = str(failure)
    samples = {peer: Sample(tuple(taken), "s") for peer, taken in times.items() if taken}
    return [_row(variant, samples, failures) for variant in VARIANTS]


def _once(peer: str, workspace: Workspace, *, first: bool) -> float:
    if peer == "by_hand":
        return by_hand(workspace)
    answer = workspace.first_load(peer) if first else workspace.cold_load(peer)
    return float(answer["load"])


def _row(variant: Variant, samples: dict[str, Sample], failures: dict[str, str]) -> Row:
    if variant.peer in failures:
        return Row(NAME, variant.who, variant.what, None, failures[variant.peer])
    sample = samples[variant.peer]
    ratio = None
    if variant.against in samples:
        ratio = samples[variant.against].median / sample.median
    return Row(NAME, variant.who, variant.what, sample, ratio=ratio)


def by_hand(workspace: Workspace) -> float:
    """Wall seconds of the plan's own commands: the compiles side by side, then the link."""
    stage = Path(tempfile.mkdtemp(prefix="by-hand-", dir=workspace.root))
    command = [sys.executable, "-m", "opkiln", "plan", "cpu_adam", "--json", "--stage", str(stage)]
    return run(json.loads(finish(command, workspace.warm).stdout), stage)


def run(plan: dict[str, Any], stage: Path) -> float:
    """Wall seconds of a plan that was printed as JSON."""
    environment = plan["environment"] | {"PATH": os.environ["PATH"]}

    def finished(step: dict[str, Any]) -> None:
        done = subprocess.run(
            step["argv"], cwd=stage, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Failure(f"exit status {done.returncode}: {done.stderr.strip()[-160:]}")

    compiles = [step for step in plan["steps"] if step["kind"] == "compile"]
    links = [step for step in plan["steps"] if step["kind"] == "link"]
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(finished, compiles))
    for step in links:
        finished(step)
    seconds = time.perf_counter() - begin
    if not Path(plan["output"]).exists():
        raise Failure("the commands succeeded and made no library")
    return seconds


def read_ahead() -> None:
    """Bring the headers that anybody compiles into memory, so that nobody pays for the disk."""
    for package in ("torch", "tvm_ffi", "deepspeed"):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        for path in Path(spec.origin).parent.rglob("*"):
            if path.suffix in {".h", ".hpp", ".cuh", ".inc", ".cpp"} and path.is_file():
                path.read_bytes()
