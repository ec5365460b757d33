"""Draws the diagrams of the documentation: a load in short and in full, the layers of the store.

    python docs/site/diagrams.py        # docs/pictures/flow.svg, load_path.svg, store_layers.svg

The same script gives the same pictures, byte for byte; tests/unit/test_site.py compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
WIDTH = 720

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.dim { fill: #59636e; font-size: 12px }
.strong { font-weight: 600 }
.box { fill: #f6f8fa; stroke: #8c959f }
.good { fill: #dafbe1; stroke: #1a7f37 }
.hot { fill: #fff1e5; stroke: #bc4c00 }
.go { stroke: #59636e; fill: none; stroke-width: 1.5 }
.yes { stroke: #1a7f37; fill: none; stroke-width: 1.5 }
.tip { fill: #59636e } .tip-yes { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.dim { fill: #9198a1 }
.box { fill: #151b23; stroke: #656c76 }
.good { fill: #12261e; stroke: #3fb950 }
.hot { fill: #2b1d12; stroke: #f0883e }
.go { stroke: #9198a1 } .yes { stroke: #3fb950 }
.tip { fill: #9198a1 } .tip-yes { fill: #3fb950 }
}
"""
_TIP = (
    '<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z" class="{name}"/></marker>'
)


def svg(height: int, about: str, parts: list[str]) -> str:
    """A picture of these parts."""
    tips = "".join(_TIP.format(name=name) for name in ("tip", "tip-yes"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(about)}">\n'
        f"<style>{STYLE}</style>\n<defs>{tips}</defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, look: str = "", anchor: str = "start") -> str:
    return f'<text class="{look}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, look: str, *lines: str) -> list[str]:
    """A box; its first line is its title, the others explain it."""
    middle, top = x + width / 2, y + height / 2 - 8 * (len(lines) - 1) + 5
    return [
        f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>',
        *(
            text(middle, top + 17 * number, line, "dim" if number else "strong", "middle")
            for number, line in enumerate(lines)
        ),
    ]


def arrow(path: str, look: str = "go") -> str:
    tip = "tip-yes" if look == "yes" else "tip"
    return f'<path class="{look}" d="{path}" marker-end="url(#{tip})"/>'


# A load in short


def flow() -> str:
    """From a declaration to a call, as the landing page and the README have it."""
    top, wide, high, step = 46, 120, 56, 148
    boxes = (
        ("box", "an op", "@opkiln.op, load()"),
        ("box", "receipt", "nothing changed?"),
        ("box", "store", "same contents?"),
        ("hot", "build", "compile, then try it"),
        ("good", "native op", "verified, opened"),
    )
    lefts = [4 + step * number for number in range(len(boxes))]
    parts: list[str] = []
    for number, (left, (look, name, about)) in enumerate(zip(lefts, boxes, strict=True)):
        parts += box(left, top, wide, high, look, name, about)
        if number:
            parts.append(
                arrow(
                    f"M{left - step + wide} {top + 28}H{left - 2}", "yes" if number == 4 else "go"
                )
            )
    parts += [text(lefts[n] - 14, top + 22, "no", "dim", "middle") for n in (2, 3)]
    last = lefts[4] + wide / 2
    parts.append(arrow(f"M{lefts[1] + 60} {top}V24H{last:g}V{top - 2}", "yes"))
    parts.append(f'<path class="yes" d="M{lefts[2] + 60} {top}V24"/>')
    parts.append(text(lefts[3] + 60, 16, "a hit: no compiler, no lock, no write", "dim", "middle"))
    parts.append(arrow(f"M{lefts[3] + 60} {top + high}V{top + high + 42}"))
    parts.append(text(lefts[3] + 68, top + high + 24, "no compiler, an error, not allowed", "dim"))
    reference = ("the op in PyTorch, its reference", "with one warning that says why")
    parts += box(lefts[2], top + high + 44, 2 * wide + 28, high, "hot", *reference)
    about = (
        "From an op to a call: receipt, store, build; the reference serves where none of them can"
    )
    return svg(top + 2 * high + 54, about, parts)


# The path of a load

QUESTIONS = (
    ("Is it loaded in this process?", "then it is called, and nothing is looked at"),
    ("Does an installed library fit?", "a wheel of ops, or one that came with the package"),
    ("Is every fact of the receipt true?", "by stat alone: no compiler, no lock, no write"),
    ("Has the store an entry of these keys?", "what differs by stat is compared by contents"),
    ("Does an entry of a listed layer fit?", "OPKILN_STORE_LAYERS: an image, a group, a bundle"),
    ("Has a remote tier one?", "OPKILN_REMOTES; what is fetched goes into the store"),
    ("May it be compiled here?", "OPKILN_MODE, and a compiler that can"),
    ("Has it a reference?", "its version in PyTorch"),
)


def load_path() -> str:
    """Which question is asked when, and where each answer leads."""
    left, wide, high, step = 10, 330, 46, 62
    right, column = 470, 240
    parts: list[str] = []
    tops = [10 + step * number for number in range(len(QUESTIONS))]
    bus = left + wide + 60
    for number, ((question, about), top) in enumerate(zip(QUESTIONS, tops, strict=True)):
        parts += box(left, top, wide, high, "box", question, about)
        middle = left + wide / 2
        parts.append(arrow(f"M{middle:g} {top + high}V{top + step - 2}"))
        parts.append(text(middle + 8, top + high + 13, "no", "dim"))
        parts.append(text(left + wide + 8, top + high / 2 - 5, "yes", "dim"))
        if 1 <= number <= 5:
            parts.append(f'<path class="yes" d="M{left + wide} {top + high / 2:g}H{bus}"/>')
    centre = [top + high / 2 for top in tops]
    parts.append(f'<path class="yes" d="M{bus} {centre[1]:g}V{centre[5]:g}"/>')
    parts.append(arrow(f"M{bus} {centre[3]:g}H{right - 2}", "yes"))
    parts += box(right, tops[0], column, high, "good", "call", "from torch's dispatcher, no Python")
    parts += box(
        right, tops[1] + 14, column, high, "good", "open", "register its kernels with torch"
    )
    verified = ("verify", "owner, mode, SHA-256")
    parts += box(right, tops[3], column, high, "good", *verified)
    parts += box(right, tops[6] - 14, column, 74, "hot", "build", "plan, compile, link,",
                 "load it in a child, publish")  # fmt: skip
    parts += box(
        right, tops[7] + 10, column, high, "hot", "run the reference", "one warning says why"
    )
    end = tops[7] + step
    parts += box(left, end, wide, high - 10, "hot", "an error, with a hint")
    parts.append(arrow(f"M{left + wide} {centre[0]:g}H{right - 2}", "yes"))
    parts.append(arrow(f"M{left + wide} {centre[6]:g}H{right - 2}", "yes"))
    parts.append(arrow(f"M{left + wide} {centre[7]:g}H{right - 2}", "yes"))
    middle = right + column / 2
    parts.append(arrow(f"M{middle:g} {tops[3]}V{tops[1] + 14 + high + 2}", "yes"))
    parts.append(arrow(f"M{middle:g} {tops[1] + 14}V{tops[0] + high + 2}", "yes"))
    parts.append(arrow(f"M{middle:g} {tops[6] - 14}V{tops[3] + high + 2}", "yes"))
    about = "The path of a load: the questions in their order, and where each answer leads"
    return svg(end + high, about, parts)


# The layers of the store


class Layer(NamedTuple):
    """A place where a library may come from."""

    name: str
    where: str
    written: str
    trusted: str
    look: str


LAYERS = (
    Layer("this process", "what is loaded already", "each load", "it was verified", "good"),
    Layer("installed packages", "a wheel of ops; <package>/prebuilt", "pip",
          "you installed it", "box"),
    Layer("your store", "~/.cache/opkiln, OPKILN_CACHE_DIR", "builds, fetches, imports",
          "yours, mode 0700", "good"),
    Layer("listed layers", "OPKILN_STORE_LAYERS: directories, bundles",
          "opkiln build --out, --bundle", "you list it, or a key", "box"),
    Layer("remote tiers", "OPKILN_REMOTES: registries, buckets, servers", "opkiln cache push",
          "a lock file, or a key", "box"),
    Layer("a build", "the compilers of this machine", "the first use",
          "loaded in a child first", "hot"),
    Layer("the reference", "the op in PyTorch", "the op's author", "part of the package", "hot"),
)  # fmt: skip


def store_layers() -> str:
    """The places in the order they are asked, who writes them and why they are trusted."""
    top, high, step = 46, 44, 52
    columns = (60, 360, 556)
    parts = [
        text(columns[0], 28, "asked in this order", "dim"),
        text(columns[1], 28, "written by", "dim"),
        text(columns[2], 28, "trusted because", "dim"),
        arrow(f"M24 {top}V{top + step * len(LAYERS) - 10}"),
    ]
    for number, layer in enumerate(LAYERS):
        y = top + step * number
        parts += [
            f'<rect class="{layer.look}" x="46" y="{y}" width="664" height="{high}" rx="6"/>',
            text(columns[0], y + 19, layer.name, "strong"),
            text(columns[0], y + 36, layer.where, "dim"),
            text(columns[1], y + 27, layer.written, "dim"),
            text(columns[2], y + 27, layer.trusted, "dim"),
        ]
    foot = top + step * len(LAYERS) + 14
    serves = "The first that fits serves. Its SHA-256 is checked before it is opened."
    passed = "What does not fit is passed over, with the reason."
    parts += [text(46, foot, serves, "dim"), text(46, foot + 17, passed, "dim")]
    return svg(foot + 30, "The layers of the store, in the order they are asked", parts)


PICTURES_OF = {"flow.svg": flow, "load_path.svg": load_path, "store_layers.svg": store_layers}

if __name__ == "__main__":
    for name, draw in PICTURES_OF.items():
        (PICTURES / name).write_text(draw())
