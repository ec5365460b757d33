"""Block-sparse attention beside compiled flex_attention and torch's dense attention; cold starts.

    PYTHONPATH=src python bench/ops/sparse_attn.py [--only WORD] [--out FILE] [--tiny]

bf16, 16 heads. Forward, and backward alone. flex_attention has the same mask and its blocks of 128
tokens; forward, for layouts with blocks of 64, these as well, and the faster counts. Compiling it
takes most of the script's time. Bytes are those of q, k, v and the result, so only milliseconds
mean something; for windows, forward, TFLOP/s are printed, which count only scores inside the
window. ``cold``: seconds of the first forward and backward in a new process that has
imported torch and has an empty cache of opkiln's and of inductor's; the layout or block mask
included. ``--tiny`` is small, and runs on the CPU too, without flex_attention.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Bar, Row
from torch import Tensor

from opkiln.nn import sparse_attention as sparse

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS = 16
FLEX = "flex_attention"
SMALL = f"{FLEX}, blocks of 64"
# Without these, it refuses a mask with blocks of 64; its backward pass does so with any.
SMALL_TILES = {"BLOCK_M": 64, "BLOCK_N": 64}
# The most that a call may take beside flex_attention.
SLOWER = {"forward": 0.9, "backward": 1.15}
WINDOW = 0.85  # the same for windows, forward


class Pattern(NamedTuple):
    name: str
    layout: Any
    head: int


PATTERNS = (
    Pattern("window of 512", sparse.SlidingWindow(512, 64), 64),
    Pattern("window of 512, heads of 128", sparse.SlidingWindow(512, 64), 128),
    Pattern("bigbird, blocks of 64", sparse.BigBird(64, num_random_blocks=3), 64),
    Pattern("bigbird, blocks of 128", sparse.BigBird(128, num_random_blocks=3), 64),
)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small tensors, few turns")
    parser.add_argument("--child", choices=("opkiln", "flex"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.child:
        print(f"seconds {first_call(options.child, device, options.tiny):.3f}")
        return 0
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no GPU; --tiny runs on the CPU")
    bandwidth = 1e9 if options.tiny else harness.copy_bandwidth(device)
    rows: list[Row] = []
    bars: list[Bar] = []
    for tokens in (512,) if options.tiny else (8192, 32_768):
        for pattern in PATTERNS:
            work = f"{pattern.name}, {tokens} tokens"
            if options.only not in work:
                continue
            rows += measured(work, pattern, tokens, device)
            for direction, most in SLOWER.items():
                limit = WINDOW if pattern.layout.window and direction == "forward" else most
                bars.append(Bar(f"{work}, {direction}", "opkiln", FLEX, 1 / limit))
    if options.only in "cold":
        rows += cold_rows(device, options.tiny)
        bars.append(Bar("cold", "opkiln", FLEX, 3.0))
    rows += host_rows(device)
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    print_rates(rows)
    return 1 if harness.missed(bars, rows, bandwidth) else 0


def print_rates(rows: list[Row]) -> None:
    """TFLOP/s of windows, forward: 4 * head for each query and each key that it sees."""
    for row in rows:
        tokens = int(row.work.split()[-3]) if row.work.endswith("tokens, forward") else 0
        pattern = next(
            (each for each in PATTERNS if row.work.startswith(f"{each.name}, {tokens} ")), None
        )
        if pattern and pattern.layout.window and "dense" not in row.who:
            window = pattern.layout.window
            pairs = window * tokens - window * (window - 1) // 2
            rate = 4 * pattern.head * HEADS * pairs / row.ms / 1e9
            print(f"{row.work}, {row.who}: {rate:.0f} TFLOP/s in the window")


def tensors(tokens: int, head: int, device: torch.device, heads: int = HEADS) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (1, heads, tokens, head)
    return [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]


def mask_of(layout: Any, tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """The layout as a ``mask_mod`` of flex_attention."""
    plan = layout.plan(tokens, device)
    if layout.window:
        return lambda _b, _h, q, k: (q >= k) & (q - k < layout.window)
    seen, block = plan.seen[0], layout.block
    return lambda _b, _h, q, k: seen[q // block, k // block]


def flex_ways(layout: Any, tokens: int, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # there is a limit of graphs for one function
    compiled = torch.compile(flex_attention, dynamic=False)
    ways = {}
    for size in (128,) if layout.window else sorted({128, layout.block}):
        mask = create_block_mask(
            mask_of(layout, tokens, device), None, None, tokens, tokens, device=device,
            BLOCK_SIZE=size,
        )  # fmt: skip
        name, tiles = (SMALL, SMALL_TILES) if size < 128 else (f"{FLEX}, blocks of {size}", None)
        ways[name] = partial(compiled, block_mask=mask, kernel_options=tiles)
    return ways


def measured(work: str, pattern: Pattern, tokens: int, device: torch.device) -> list[Row]:
    gpu = device.type == "cuda"
    q, k, v = tensors(tokens, pattern.head, device, HEADS if gpu else 2)
    grad = torch.randn_like(q)
    ways: dict[str, Any] = {"opkiln": partial(sparse.attention, layout=pattern.layout)}
    if gpu:
        ways |= flex_ways(pattern.layout, tokens, device)
        dense = torch.nn.functional.scaled_dot_product_attention
        ways["torch, dense"] = partial(dense, is_causal=pattern.layout.causal)
    check(ways, q, k, v)
    outs = {name: way(q, k, v) for name, way in ways.items() if name != SMALL}

    def forward(way: Any) -> None:
        with torch.no_grad():
            way(q, k, v)

    def backward(out: Tensor) -> None:
        torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    rows, size = [], 4 * q.nbytes
    repeats = 15 if gpu else 1
    forwards = harness.measured({n: partial(forward, w) for n, w in ways.items()}, device, repeats)
    backwards = harness.measured(
        {n: partial(backward, o) for n, o in outs.items()}, device, repeats
    )
    for direction, taken in (("forward", forwards), ("backward", backwards)):
        found = {
            name: Row(f"{work}, {direction}", name, size, *time) for name, time in taken.items()
        }
        rows += found.values()
        flex = [row for name, row in found.items() if name.startswith(FLEX)]
        if flex:
            rows.append(min(flex, key=lambda row: row.ms)._replace(who=FLEX))
    return rows


def check(ways: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> None:
    """All but dense attention give the same."""
    with torch.no_grad():
        ours = ways["opkiln"](q, k, v)
        for name, way in ways.items():
            if name.startswith("flex"):
                torch.testing.assert_close(way(q, k, v), ours, rtol=2e-2, atol=2e-2)


def cold_rows(device: torch.device, tiny: bool) -> list[Row]:
    rows = []
    for who in ("opkiln",) if device.type == "cpu" else ("opkiln", "flex"):
        with tempfile.TemporaryDirectory() as folder:
            caches = {
                name: str(Path(folder, name))
                for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
            }
            command = [sys.executable, __file__, "--child", who, *(["--tiny"] if tiny else [])]
            done = subprocess.run(
                command, env={**os.environ, **caches}, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise RuntimeError(done.stderr)
        seconds = float(done.stdout.split("seconds ")[-1].split()[0])
        name = FLEX if who == "flex" else who
        rows.append(Row("cold", name, 1, seconds * 1e3))
    return rows


def first_call(who: str, device: torch.device, tiny: bool) -> float:
    """Seconds until the gradients of the first call are there."""
    gpu = device.type == "cuda"
    tokens, layout = 512 if tiny else 8192, sparse.SlidingWindow(512, 64)
    q, k, v = tensors(tokens, 64, device, HEADS if gpu else 2)
    grad = torch.randn_like(q)
    (q + k).sum().item()  # torch's own start
    began = time.perf_counter()
    if who == "opkiln":
        out = sparse.attention(q, k, v, layout)
    else:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def near(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < 512)

        mask = create_block_mask(near, None, None, tokens, tokens, device=device)
        out = torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=mask)
    torch.autograd.grad(out, (q, k, v), grad)
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def host_rows(device: torch.device) -> list[Row]:
    """The host's time for a call with little to do, beside that of an eager ``x + x``."""
    q = torch.randn(1, 1, 64, 64, device=device).bfloat16()
    layout = sparse.Dense(64)
    fns = {"x + x": lambda: q + q, "attention": lambda: sparse.attention(q, q, q, layout)}
    taken = harness.measured({name: partial(_many, fn) for name, fn in fns.items()}, device, 10)
    return [Row("host time of a call", n, 0, t.ms / 50, t.host_ms / 50) for n, t in taken.items()]


def _many(fn: Callable[[], Any]) -> None:
    for _ in range(50):
        fn()


if __name__ == "__main__":
    sys.exit(main())
