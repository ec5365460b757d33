"""What the first call of a catalogue op waits for: the build of one of its libraries, from nothing.

    python bench/cold_ops.py --target cuda:9.0a --out bench/results/cold_ops.json

Each library is what one process asks for first: a family of functions, one dtype, one head size.
It is built in a fresh process that has imported torch, with an empty store and nothing known of the
compilers. CPU seconds are those of all processes of the build; two quiet cores need at least half
of them. Other work on the machine makes the wall time longer, and CPU seconds a little.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import machine
import table
from children import Workspace, ask
from measured import Bar, Failure, Row, Sample

NAME = "cold build of an op"
_DTYPE = "bfloat16"
_FAMILIES = ("norms", "activations", "residuals", "rotary", "softmax", "int8_linear")
LIBRARIES = (
    *(f"transformer_inference__{family}__{_DTYPE}" for family in _FAMILIES),
    f"kv_attention__HEAD_128_T_{_DTYPE}_PAGED_false",
    f"kv_attention__HEAD_256_T_{_DTYPE}_PAGED_true",
    f"transformer__norms__{_DTYPE}",
    f"transformer__columns__{_DTYPE}",
    f"stochastic_transformer__{_DTYPE}",
    *(f"evoformer_attn__{direction}__{_DTYPE}" for direction in ("forward", "backward")),
    "random_ltd",
    "spatial_inference",
    *(f"ragged_device_ops__{family}" for family in ("paged", "gating", "rows")),
)
CPU_LIMIT, WALL_LIMIT = 16.0, 8.0  # seconds, of two cores


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("libraries", nargs="*", help="measure these (default: all)")
    parser.add_argument("--target", default="cuda:9.0a", help="what is compiled for")
    parser.add_argument("--repeats", type=int, default=3, help="builds of each (default: 3)")
    parser.add_argument("--quiet", action="store_true", help="nothing else runs: judge wall time")
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    return parser.parse_args()


def built(library: str, target: str, workspace: Workspace) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one build. Raises Failure."""
    with workspace.cold() as caches:
        taken = ask(["child_cold_op.py", library, target], caches)
    return taken["cpu"], taken["wall"]


def row_of(library: str, asked: argparse.Namespace, workspace: Workspace) -> Row:
    """A line of the table. The least is what is held against the bar: the rest is other work."""
    taken = [built(library, asked.target, workspace) for _ in range(asked.repeats)]
    cpu, wall = (tuple(each) for each in zip(*taken, strict=True))
    bar = Bar(CPU_LIMIT, min(cpu), f"<= {CPU_LIMIT:.0f} s of CPU")
    if asked.quiet:
        bar = Bar(WALL_LIMIT, min(wall), f"<= {WALL_LIMIT:.0f} s")
    details = {"wall_s": list(wall)}
    return Row(NAME, "opkiln", library, Sample(cpu, "s"), bar=bar, details=details)


def main() -> int:
    """Measure, print, store; 1 when a bar was missed."""
    asked = arguments()
    head = machine.described()
    head["commit"] = asked.commit or head["commit"]
    head["target"] = asked.target
    before = machine.load_average()
    workspace, rows = Workspace(), []
    try:
        for library in asked.libraries or LIBRARIES:
            rows.append(row_of(library, asked, workspace))
            print(library, rows[-1].bar, flush=True)
    except Failure as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    finally:
        workspace.close()
    head["load_average"] = {"before": before, "after": machine.load_average()}
    return table.finish(head, rows, asked.out)


if __name__ == "__main__":
    sys.exit(main())
