"""Losses of a small transformer under each optimizer, beside torch's: figures and a picture.

    PYTHONPATH=src python bench/ops/loss_curves.py             # trains on what there is, then draws
    PYTHONPATH=src python bench/ops/loss_curves.py --draw      # draws what was trained before

Training on the CPU writes ``bench/results/loss_curves_cpu.json``, on a GPU (whose machine need not
be this one) ``loss_curves_cuda.json``; the picture, ``docs/pictures/loss_curves.svg``, has a panel
for each optimizer in either.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import harness
import machine
import torch
from picture import STYLE
from training import CONTESTS, STEPS, losses

import opkiln

BENCH = Path(__file__).resolve().parents[1]
RESULTS = BENCH / "results"
PICTURE = BENCH.parent / "docs" / "pictures" / "loss_curves.svg"

ACROSS, WIDTH, HEIGHT, LEFT, TOP, GAP = 3, 220, 130, 30, 44, 20
WINDOW = 10
LINES = """
.line { fill: none; stroke-width: 1.5 }
.line.mine { fill: none; stroke: #bc4c00 }
.line.other { fill: none; stroke: #d1d9e0; stroke-width: 6; stroke-linecap: round }
.line.compiled { stroke: #1f2328; stroke-dasharray: 1 7; stroke-width: 2 }
.axis { stroke: #8c959f; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
.line.mine { stroke: #f0883e }
.line.other { stroke: #3d444d }
.line.compiled { stroke: #f0f6fc }
}
"""


def train(device: str, backend: str, commit: str | None) -> dict[str, Any]:
    """The curves of every optimizer for the device: ours, ours compiled, torch's."""
    prefix = "CPU" if device == "cpu" else "Fused"
    curves = {}
    for name, contest in CONTESTS.items():
        if not name.startswith(prefix):
            continue
        kind = getattr(opkiln.optim, name)
        curves[name] = {
            "rival": contest.rival,
            "theirs": losses(contest.theirs, device=device),
            "ours": losses(contest.ours(kind), device=device),
            "compiled": losses(contest.ours(kind), device=device, backend=backend),
        }
        apart = _apart(curves[name])
        print(f"{name}: {curves[name]['ours'][-1]:.4f}, {apart:.2g} from {contest.rival}")
    head = machine.described()
    return {
        "date": head["date"],
        "machine": harness.where(),
        "commit": commit or head["commit"],
        "torch": torch.__version__,
        "curves": curves,
    }


def _apart(curve: dict[str, Any]) -> float:
    """The largest difference of any step from torch's, eager and compiled."""
    return max(
        abs(mine - other)
        for which in ("ours", "compiled")
        for mine, other in zip(curve[which], curve["theirs"], strict=True)
    )


def draw(results: list[Path], target: Path) -> None:
    """Write the picture of some results files."""
    panels: list[str] = []
    for path in results:
        found = json.loads(path.read_text())
        gpu = found["machine"].partition(",")[0] if path.stem.endswith("cuda") else ""
        for name, curve in found["curves"].items():
            title = f"{name} on {gpu}" if gpu else name
            panels.append(_panel(len(panels), title, curve))
    rows = -(-len(panels) // ACROSS)
    width = ACROSS * (LEFT + WIDTH + GAP)
    height = rows * (TOP + HEIGHT + GAP + 10) + 14
    footer = (
        f"Loss over {STEPS} steps, means of {WINDOW}. "
        "Grey: torch. Orange: opkiln; dots: opkiln in a compiled program."
    )
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="Losses beside torch\'s">\n'
        f"<style>{STYLE}{LINES}</style>\n"
        + "\n".join(panels)
        + f'\n<text class="faint" x="0" y="{height - 12}">{escape(footer)}</text>\n</svg>\n'
    )


def _means(values: list[float]) -> list[float]:
    """Of as many neighbours as there are in a window: a batch is small, and its loss noisy."""
    windows = [values[i : i + WINDOW] for i in range(len(values) - WINDOW + 1)]
    return [sum(window) / WINDOW for window in windows]


def _panel(index: int, title: str, curve: dict[str, Any]) -> str:
    x = LEFT + index % ACROSS * (LEFT + WIDTH + GAP)
    y = TOP + index // ACROSS * (TOP + HEIGHT + GAP + 10)
    smooth = {which: _means(curve[which]) for which in ("theirs", "ours", "compiled")}
    shown = [value for values in smooth.values() for value in values]
    low, high = min(shown), max(shown)

    def points(values: list[float]) -> str:
        return " ".join(
            f"{x + i / (len(values) - 1) * WIDTH:.1f},"
            f"{y + (high - value) / (high - low) * HEIGHT:.1f}"
            for i, value in enumerate(values)
        )

    apart = f"at most {_apart(curve):.0e} from {curve['rival']}"
    parts = [
        f'<text class="title" x="{x}" y="{y - 24}">{escape(title)}</text>',
        f'<text class="faint" x="{x}" y="{y - 8}">{escape(apart)}</text>',
        f'<path class="axis line" d="M{x} {y}V{y + HEIGHT}H{x + WIDTH}"/>',
        *(
            f'<text class="faint" x="{x - 4}" y="{at}" text-anchor="end">{value:.1f}</text>'
            for value, at in ((high, y + 8), (low, y + HEIGHT))
        ),
        *(
            f'<polyline class="line {shade}" points="{points(smooth[which])}"/>'
            for which, shade in (("theirs", "other"), ("ours", "mine"), ("compiled", "compiled"))
        ),
    ]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draw", action="store_true", help="draw only")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", metavar="SHA", help="of the sources; else git is asked")
    options = parser.parse_args()
    if not options.draw:
        torch.set_num_threads(1)  # the model is small: threads would wait for each other
        found = train(options.device, options.backend, options.commit)
        target = RESULTS / f"loss_curves_{options.device}.json"
        target.write_text(json.dumps(found, indent=1) + "\n")
    draw(sorted(RESULTS.glob("loss_curves_*.json")), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
