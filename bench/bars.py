"""The catalogue's pictures: how near each op comes to a copy within the same memory.

    python bench/bars.py        # from bench/results to docs/pictures; needs no torch

A bar is the traffic that a work must read and write, by the time it took, as a share of the copy's
bandwidth in the same run. The same results give the same pictures, byte for byte.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from picture import STYLE

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
PICTURES = BENCH.parent / "docs" / "pictures"

WIDTH, LEFT, RIGHT = 760, 250, 130
BAR, GAP, HEAD, FOOT = 14, 5, 32, 62
WHOLE = 1.1  # the share at the right end of the scale: some works are kinder to the caches
LINE = """
.copy { stroke: #8c959f; stroke-width: 1; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
.copy { stroke: #656c76 }
}
"""


class Group(NamedTuple):
    """Rows of a results file that are shown together, each with what it is called."""

    title: str
    file: str
    work: str  # a pattern; what it does not match of a row's work is left out
    who: str = ""  # a pattern that a row's `who` begins with
    by_work: bool = False  # rows are called by their work, those of others by `who` besides


class Picture(NamedTuple):
    """A picture, and what it shows."""

    name: str
    about: str  # the machine's part of the footer is added
    groups: tuple[Group, ...]


_KERNELS = r"(?!.*whole step)"
PICTURES_OF = (
    Picture(
        "optimizers_cpu.svg",
        "Steps of the CPU optimizers, whole calls; pale: a plain loop over the same memory.",
        tuple(
            Group(work, "cpu_optimizers.json", re.escape(work))
            for work in (
                "AdamW, 64M fp32", "AdamW, 600 tensors, 26.7M fp32",
                "AdamW, 10,000 tensors of 257 fp32", "AdamW, 64M bf16",
                "AdamW, 64M fp32 and a bf16 copy", "Adagrad, 64M fp32", "Lion, 64M fp32",
            )
        ),
    ),
    Picture(
        "optimizers_h200.svg",
        "Kernels of a step; a whole step begins and ends with an idle GPU. Pale: plain traffic.",
        (
            Group("AdamW, 512M fp32, one tensor", "gpu_optimizers.json", "512M fp32, one tensor",
                  rf"{_KERNELS}(FusedAdam|torch|DeepSpeed|plain)"),
            Group("AdamW, 800 tensors, 315M fp32", "gpu_optimizers.json", "800 tensors, 315M fp32",
                  "FusedAdam|torch|DeepSpeed"),
            Group("AdamW, 512M bf16", "gpu_optimizers.json", "512M bf16"),
            Group("Lion and LAMB, 512M fp32, one tensor", "gpu_optimizers.json",
                  "512M fp32, one tensor", "FusedL"),
            Group("Lion and LAMB, 800 tensors, 315M fp32", "gpu_optimizers.json",
                  "800 tensors, 315M fp32", "FusedL"),
        ),
    ),
    Picture(
        "quantizers_h200.svg",
        "Each reads and writes every byte once.",
        (
            Group("Integers: 268M fp16, groups of 2048", "quantizer.json",
                  ", float16, groups of 2048", by_work=True),
            Group("Floats: 268M bf16, groups of 512", "fp_quantizer.json", ", 512",
                  by_work=True),
        ),
    ),
    Picture(
        "transformer_h200.svg",
        "Each call finds other tensors in memory, so that no cache helps; bf16.",
        (
            *(
                Group(f"{work}, 32768 x 4096", "norms.json",
                      re.escape(f"{work}, 32768 x 4096, bfloat16"))
                for work in ("rms norm", "layer norm", "add and rms norm", "bias and gelu",
                             "gated silu", "residual, attention and bias")
            ),
            Group("rotary embedding, 8 x 4096 x 32 x 128", "rotary_softmax_linear.json",
                  "rotary 8 x 4096 x 32 x 128 bf16", r"opkiln$|torch"),
            Group("softmax, 131072 x 1024", "rotary_softmax_linear.json",
                  "softmax 131072 x 1024 bf16", r"opkiln$|torch"),
            Group("bias and residual of images, 64 x 320 x 64 x 64", "tokens.json",
                  "bias and residual, 64 x 320 x 64 x 64, bfloat16"),
            Group("gather of half of the tokens, 16 x 2048 x 4096", "tokens.json",
                  "gather, 16 x 2048 x 4096, bfloat16"),
        ),
    ),
    Picture(
        "decode_h200.svg",
        "One new token, 32 query heads of 128, bf16: keys and values are read once.",
        tuple(
            Group(f"batch {batch}, {heads} kv heads, context {context}", "kv_attention.json",
                  f"batch {batch}, {heads} kv heads, {context}", r"opkiln|torch (cuDNN|flash)")
            for batch, heads, context in ((1, 32, 8192), (1, 8, 8192), (8, 32, 8192), (8, 8, 1024),
                                          (64, 32, 8192), (64, 8, 32768))
        ),
    ),
)  # fmt: skip


def chosen(group: Group, document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The group's rows, with what each is called."""
    for row in document["rows"]:
        work, who = row["work"], row["who"]
        if not re.match(group.who, who):
            continue
        if group.by_work:
            rest = re.sub(f"{group.work}$", "", work)
            if rest == work or re.search(r"float(16|32)", rest.replace("bfloat16", "")):
                continue
            rest = re.sub(r" ?(to )?bfloat16( to)?", "", rest)
            yield (rest if who == "opkiln" else f"{rest}, {who}"), row
        elif re.fullmatch(group.work, work):
            yield who, row


def shade(who: str) -> str:
    """A bar's class: ours, the plain loop that is no system, or another's."""
    if who.startswith("plain"):
        return "floor"
    return "mine" if re.match("opkiln|CPU|Fused", who) else "other"


def draw(picture: Picture, target: Path) -> None:
    """Write the picture. Raises FileNotFoundError where a results file is not there."""
    parts: list[str] = []
    documents = {
        group.file: json.loads((RESULTS / group.file).read_text()) for group in picture.groups
    }
    scale = (WIDTH - LEFT - RIGHT) / WHOLE
    y = 0
    for group in picture.groups:
        rows = list(chosen(group, documents[group.file]))
        if not rows:
            continue
        y += HEAD
        parts.append(f'<text class="title" x="0" y="{y - 10}">{escape(group.title)}</text>')
        top = y
        for name, row in rows:
            length = max(min(row["of_copy"], WHOLE) * scale, 1)
            kind, value = shade(row["who"]), f"{row['of_copy']:.0%}, {_time(row['ms'])}"
            parts += [
                f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>',
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}"/>',
                f'<text x="{WIDTH - RIGHT + 8}" y="{y + 11}">{escape(value)}</text>',
            ]
            y += BAR + GAP
        at = f"{LEFT + scale:.1f}"
        parts.append(f'<path class="copy" d="M{at} {top - 4}V{y}"/>')
    y += FOOT
    for line, text in enumerate([picture.about, *_footer(documents)]):
        parts.append(f'<text class="faint" x="0" y="{y - 40 + 16 * line}">{escape(text)}</text>')
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" aria-label="Shares of the copy\'s bandwidth">\n'
        f"<style>{STYLE}{LINE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:#.3g} ms"


def _footer(documents: dict[str, dict[str, Any]]) -> list[str]:
    first = next(iter(documents.values()))
    machine = ", ".join(first["machine"].split(", ")[:2])
    copies = sorted({document["copy_gb_per_s"] for document in documents.values()})
    rate = " to ".join(dict.fromkeys(f"{copy:.0f}" for copy in (copies[0], copies[-1])))
    return [
        "Share of the bandwidth of a copy (dashed line) in the same run; longer is better.",
        f"{machine}, torch {first['torch']}, {first['date'][:10]}; copy {rate} GB/s.",
    ]


def main() -> int:
    for picture in PICTURES_OF:
        try:
            draw(picture, PICTURES / picture.name)
        except FileNotFoundError as error:
            print(f"{picture.name}: {Path(error.filename).name} was not measured", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
