"""opkiln's transformer ops beside DeepSpeed's own kernels, which opkiln compiles: time and error.

    make deepspeed-sources
    PYTHONPATH=src python bench/ops/deepspeed_kernels.py [--out FILE] [--keep BUNDLE] [--only WORD]

First DeepSpeed's modules are compiled, which takes minutes; ``--keep`` writes them to a file, and
``--kept`` takes them from there instead. Then each group of works runs in a process of its own, so
that a kernel that fails takes no other with it. What does not compile or run is in the result with
its reason. ``--tiny --stand-in`` tries the script on a CPU: opkiln's modules with DeepSpeed's
signatures take the place of DeepSpeed's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed_attention
import deepspeed_build
import deepspeed_layer
import deepspeed_works
import harness
import torch
from deepspeed_compared import Broken, Found, compared
from deepspeed_sources import FOLDER
from harness import Row

from opkiln.errors import OpkilnError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Case = tuple[str, Callable[..., Found]]

HERE = Path(__file__).resolve().parent
BROKEN = 3  # the exit status of a group's process that cannot go on
LOSSES = 5  # processes that a group may break
_PIECES = {
    "rows": deepspeed_works.row_works,
    "scores": deepspeed_works.score_works,
    "tokens": deepspeed_works.token_works,
}
GROUPS = (*_PIECES, "attention", "layer")


def main() -> int:
    options = _options()
    if options.group:
        return run_group(options)
    began = time.monotonic()
    deadline = began + options.seconds
    if options.kept.is_file():
        os.environ["OPKILN_STORE_LAYERS"] = str(options.kept)
    built = {} if options.stand_in else built_modules(options, deadline - 120)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = 1e9 if options.tiny else harness.copy_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found = [each for group in GROUPS for each in from_group(group, options, built, deadline)]
    rows = [Row(**row) for each in found for row in each.get("rows", ())]
    more = {"modules": built, "checks": [_told(each) for each in found]}
    harness.report(rows, bandwidth, options.out, commit=options.commit, more=more)
    if not options.stand_in:
        _tell_ratios(rows)
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--sources", type=Path, default=deepspeed_build.SOURCES, metavar="DIR")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what is compiled there")
    parser.add_argument(
        "--kept", type=Path, default=FOLDER / "built.bundle", metavar="FILE",
        help="what an earlier run kept, if it is there",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=290.0, help="in which all must end")
    parser.add_argument("--tiny", action="store_true", help="small tensors: whether it runs")
    parser.add_argument("--stand-in", action="store_true", help="opkiln in DeepSpeed's place")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--built", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--after", default="", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def built_modules(options: argparse.Namespace, deadline: float) -> dict[str, dict[str, Any]]:
    """For each module of DeepSpeed the seconds that it took, and why it is not there, if it is not.

    In a process of its own: what is not compiled at the deadline is given up, the rest is kept.
    """
    command = [sys.executable, str(HERE / "deepspeed_build.py"), "--sources", str(options.sources)]
    if options.keep and not options.kept.is_file():
        command += ["--keep", str(options.keep)]
    why = ""
    with tempfile.TemporaryFile("w+") as out:
        try:
            left = max(1.0, deadline - time.monotonic())
            status = subprocess.run(command, stdout=out, timeout=left, check=False).returncode
            why = f"the build ended with status {status}"
        except subprocess.TimeoutExpired:
            why = "not compiled in time"
        out.seek(0)
        told = {each.pop("module"): each for each in map(json.loads, out)}
    found = {
        name: told.get(name, {"seconds": None, "why": why}) for name in deepspeed_build.MODULES
    }
    for name, each in found.items():
        print(f"{name}: {each['why'] or str(each['seconds']) + ' s'}", flush=True)
    return found


def from_group(
    group: str, options: argparse.Namespace, built: dict[str, Any], deadline: float
) -> Iterator[dict[str, Any]]:
    """What a group's processes wrote; another one goes on after the work that broke the last."""
    after = ""
    for _ in range(LOSSES):
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as to:
            command = [sys.executable, __file__, "--group", group, "--to", to.name]
            command += ["--built", json.dumps({k: v["why"] for k, v in built.items()})]
            command += ["--only", options.only, "--after", after]
            command += ["--sources", str(options.sources)]
            command += ["--tiny"] * options.tiny + ["--stand-in"] * options.stand_in
            why = ""
            try:
                left = max(1.0, deadline - time.monotonic())
                status = subprocess.run(command, timeout=left, check=False).returncode
                why = f"its process ended with status {status}" if status else ""
            except subprocess.TimeoutExpired:
                status, why = 0, "no time was left"
            lines = [json.loads(line) for line in to]
        for begun, done in _pairs(lines):
            yield done or {"work": begun, "failed": {"all": why}}
        if not status:
            return
        last = lines[-1]["work"] if lines else after
        if last == after:  # it did not even begin
            yield {"work": group, "failed": {"all": why}}
            return
        after = last


def _pairs(lines: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each work that was begun, with what was found, if it ended."""
    for at, line in enumerate(lines):
        if line.get("begun"):
            follows = lines[at + 1] if at + 1 < len(lines) else None
            yield line["work"], follows


def run_group(options: argparse.Namespace) -> int:
    """The works of one group; a line when one begins, and a line with what came of it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    modules = standing_in if options.stand_in else partial(_built, options)
    waiting = bool(options.after)
    with open(options.to, "a", buffering=1) as out:
        for name, run in cases(options.group, device, options.tiny):
            if waiting:
                waiting = name != options.after
                continue
            if options.only not in name:
                continue
            out.write(json.dumps({"work": name, "begun": True}) + "\n")
            try:
                with torch.set_grad_enabled(options.group == "layer"):
                    found = run(modules, device, 2 if options.tiny else 11)
            except Broken as error:
                out.write(json.dumps({"work": name, "failed": {"all": str(error)}}) + "\n")
                return BROKEN
            rows = [row._asdict() for row in found.rows]
            out.write(json.dumps({"work": name, **asdict(found), "rows": rows}) + "\n")
    return 0


def cases(group: str, device: torch.device, tiny: bool) -> Iterator[Case]:
    if group == "attention":
        for cell in deepspeed_attention.cells(tiny):
            yield cell.name, partial(deepspeed_attention.compared, cell)
    elif group == "layer":
        for size in deepspeed_layer.sizes(tiny):
            yield f"layer {size}", partial(deepspeed_layer.compared, size)
    else:
        for work in _PIECES[group](device, tiny):
            yield work.name, partial(compared, work)


def _built(options: argparse.Namespace, name: str) -> Any:
    """Raises OpkilnError for a module that is not compiled: a group's process compiles none."""
    if why := json.loads(options.built)[name]:
        raise OpkilnError(f"{name} is not compiled", why=why.splitlines()[0])
    return deepspeed_build.loaded(name, options.sources)


@cache
def standing_in(name: str) -> Any:
    """opkiln's module with DeepSpeed's signatures. Raises OpkilnError where there is none."""
    from opkiln.compat.deepspeed.modules import OpModule
    from opkiln.compat.deepspeed.table import MODULES

    if name not in MODULES:
        raise OpkilnError(f"nothing stands in for {name}")
    return OpModule(name)


def _told(found: dict[str, Any]) -> dict[str, Any]:
    """Print what is to be said of one work besides its times; what is kept of it."""
    errors, limit = found.get("errors", {}), found.get("limit", 0.0)
    said = [
        f"{who} {error:.3g}{'' if error <= limit else ' DIFFERS'}" for who, error in errors.items()
    ]
    if said:
        print(f"{found['work']}: units of rounding from exact: {', '.join(said)}")
    for who, why in found.get("failed", {}).items():
        print(f"FAILED  {found['work']}: {who}: {why}")
    for who, peak in found.get("peaks", {}).items():
        print(f"{found['work']}: peak of {who}: {peak:.0f} MiB")
    return {key: value for key, value in found.items() if key != "rows" and value}


def _tell_ratios(rows: list[Row]) -> None:
    """How many times as fast as DeepSpeed's."""
    found = {(row.work, row.who): row for row in rows}
    for (work, who), row in found.items():
        ours = found.get((work, "opkiln"))
        if who.startswith("DeepSpeed") and ours is not None:
            print(f"{work}: opkiln {row.ms / ours.ms:.2f} x {who}")


if __name__ == "__main__":
    sys.exit(main())
