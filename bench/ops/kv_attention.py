"""Decode attention beside torch's backends, as a share of the copy's bandwidth.

    PYTHONPATH=src python bench/ops/kv_attention.py [--only WORD] [--tuning] [--out FILE]

One new token for each sequence, 32 query heads of 128 in bfloat16, 32 or 8 kv heads; the bytes are
those of the keys and values that are read. Caches take turns, so that no call finds its own in the
GPU's cache. "paged" has blocks of 16 tokens in random order. ``--tuning`` also measures other
numbers of warps and stages, and other splits. On the CPU the sizes are tiny, to try the script.
"""

from __future__ import annotations

import functools
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Bar, Row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import opkiln
from opkiln.nn.inference import KVCache, attention
from opkiln.ops.kv_attention.attention import chosen_splits
from opkiln.ops.kv_attention.functions import kv_attention

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, HEAD, BLOCK = 32, 128, 16
ROTATED = 256 << 20  # bytes of caches that take turns, at least
BACKENDS = {
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CANDIDATES = [(4, 3), (4, 2), (2, 4), (2, 6), (4, 6), (8, 3)]  # (warps, stages): up to 192 KiB
TUNED = {
    (1, 8, 1024), (1, 8, 8192), (1, 8, 32768), (8, 8, 1024), (8, 32, 8192), (64, 8, 1024),
    (64, 32, 8192),
}  # fmt: skip


class Cell(NamedTuple):
    """One size. ``calls`` is how many make a turn."""

    batch: int
    kv_heads: int
    context: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.kv_heads} kv heads, {self.context}"

    @property
    def bytes(self) -> int:
        return 4 * self.batch * self.kv_heads * self.context * HEAD

    @property
    def caches(self) -> int:
        return -(-ROTATED // self.bytes)

    @property
    def calls(self) -> int:
        return max(1, min(16, ROTATED // self.bytes))


class Given(NamedTuple):
    """What the calls of a cell are made with."""

    q: Tensor
    k: Tensor
    v: Tensor
    plain: list[KVCache]
    paged: list[KVCache]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--tuning", action="store_true", help="other warps, stages and splits")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    contexts = (1024, 8192, 32768) if on_gpu else (32, 48)
    cells = [Cell(*each) for each in itertools.product((1, 8, 64), (32, 8), contexts)]
    if not on_gpu:
        cells = cells[:4]
    bandwidth = harness.copy_bandwidth(device)
    repeats = 15 if on_gpu else 1
    cells = [cell for cell in cells if options.only in cell.name]
    rows: list[Row] = []
    bars: list[Bar] = []
    for cell in cells:
        found = measured(cell, by_all(make(cell, device), cell), device, repeats)
        rows += found
        bars += bars_of(cell, found, bandwidth)
    rows += host_rows(device)
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    missed = harness.missed(bars, rows, bandwidth)
    if options.tuning:
        rows = []
        for cell in cells:
            if tuple(cell) in TUNED:
                fns = by_candidates(make(cell, device), cell)
                rows += measured(cell, fns, device, repeats)
        harness.report(rows, bandwidth)
    return 1 if missed else 0


def measured(
    cell: Cell, fns: dict[str, list[Callable[[], Any]]], device: torch.device, repeats: int
) -> list[Row]:
    taken = harness.rotated(fns, cell.calls, device, repeats)
    return [Row(cell.name, name, cell.bytes, *time) for name, time in taken.items()]


def by_all(given: Given, cell: Cell) -> dict[str, list[Callable[[], Any]]]:
    """Ours, and the backends of torch that take these shapes on this device."""
    fns = {
        "opkiln": by_opkiln(given, given.plain, cell),
        "opkiln, paged": by_opkiln(given, given.paged, cell),
    }
    for name, backend in BACKENDS.items():
        calls = by_torch(given, backend)
        try:
            calls[0]()
        except RuntimeError:  # "No available kernel"
            continue
        fns[name] = calls
    return fns


def make(cell: Cell, device: torch.device) -> Given:
    batch, kv_heads, context = cell
    plain, paged = [], []
    lengths = torch.full((batch,), context - 1, dtype=torch.int32, device=device)
    blocks = batch * context // BLOCK
    for _ in range(cell.caches):
        shape = (batch, kv_heads, context, HEAD)
        k, v = (torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
        table = torch.randperm(blocks, device=device).view(batch, -1).int()
        plain.append(KVCache(k, v, lengths))
        in_blocks = (each.view(blocks, BLOCK, kv_heads, HEAD) for each in (k, v))
        paged.append(KVCache(*in_blocks, lengths, table))
    q, k, v = (
        torch.randn(batch, heads, 1, HEAD, dtype=torch.bfloat16, device=device)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    return Given(q, k, v, plain, paged)


def by_opkiln(given: Given, caches: list[KVCache], cell: Cell) -> list[Callable[[], Any]]:
    q, k, v = given[:3]
    return [partial(attention, q, k, v, each, context=cell.context) for each in caches]


def by_torch(given: Given, backend: SDPBackend) -> list[Callable[[], Any]]:
    def call(k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(given.q, k, v, enable_gqa=k.shape[1] != HEADS)

    return [partial(call, each.k, each.v) for each in given.plain]


@functools.cache
def candidates(device: str) -> Any:
    """The op once more, with warps and stages as parameters."""
    warps, stages = (tuple(sorted({each[i] for each in CANDIDATES})) for i in range(2))
    variants = {"HEAD": (HEAD,), "T": ("bfloat16",), "PAGED": (False,)}
    made = opkiln.op(
        cuda="decode.cu",
        mutates=("k_cache", "v_cache", "counters"),
        namespace="kv_candidates",
        needs={"archs": "8.0"},
        variants={**variants, "WARPS": warps, "STAGES": stages},
        emulate=device == "cpu",
    )
    return made(kv_attention.reference)


def by_candidates(given: Given, cell: Cell) -> dict[str, list[Callable[[], Any]]]:
    """Other kernels, and other splits for each."""
    device = given.q.device.type
    function, scale = candidates(device), HEAD**-0.5
    units = cell.batch * cell.kv_heads
    chosen = chosen_splits(units, cell.context, given.plain[0].processors)
    found: dict[str, list[Callable[[], Any]]] = {}
    fixed = {"HEAD": HEAD, "T": "bfloat16", "PAGED": False}
    kernels = {each: {**fixed, "WARPS": each[0], "STAGES": each[1]} for each in CANDIDATES}
    with ThreadPoolExecutor() as pool:
        assert all(pool.map(lambda values: function.load(device, **values), kernels.values()))
    for (warps, stages), values in kernels.items():
        name = "_".join(f"{each}_{str(value).lower()}" for each, value in values.items())
        kernel = getattr(torch.ops.kv_candidates.kv_attention, name)
        few = {1} if chosen <= 8 else set()
        for splits in sorted({max(1, chosen // 2), chosen, min(128, chosen * 2), *few}):
            found[f"{warps} warps, {stages} stages, {splits} splits"] = [
                partial(kernel, *given[:3], each.k, each.v, each.lengths, None, None,
                        each.counters, scale, True, splits)
                for each in given.plain
            ]  # fmt: skip
    return found


def bars_of(cell: Cell, rows: list[Row], bandwidth: float) -> list[Bar]:
    """Within 3% of torch's best; 1.5 times it where that leaves much; paged within 10%."""
    found = [Bar(cell.name, "opkiln, paged", "opkiln", 0.9)]
    theirs = [row for row in rows if row.who in BACKENDS]
    if theirs:
        best = min(theirs, key=lambda row: row.ms)
        share = best.bytes / best.ms * 1e3 / bandwidth
        found.append(Bar(cell.name, "opkiln", best.who, 1.5 if share < 0.65 else 0.97))
    return found


def host_rows(device: torch.device) -> list[Row]:
    """The host's share of a call, beside an eager addition."""
    given = make(Cell(1, 8, 1024 if device.type == "cuda" else 32), device)
    cache = given.plain[0]
    fns = {
        "opkiln": partial(attention, *given[:3], cache),
        "x + x": partial(torch.add, given.q, given.q),
    }
    return harness.host_rows(fns, device)


if __name__ == "__main__":
    sys.exit(main())
