"""ragged_device_ops beside torch eager and torch.compile, as fractions of the copy's bandwidth.

    PYTHONPATH=src python bench/ops/ragged.py [--out FILE] [--only WORD] [--tiny] [--no-compile]

Bytes are those of the rows that are read and written. Each turn goes through several sets of
tensors, up to 32 and 512 MB together, so that no cache helps; the time is that of one call. The
others are the same arithmetic in torch's own functions, without padding. The last rows are the
host's time of a call, beside ``x + x``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from harness import Bar, Row, copy_bandwidth, measured, missed, parser, report
from torch import Tensor

from opkiln.nn import ragged

if TYPE_CHECKING:
    from collections.abc import Callable

F16, BF16 = torch.float16, torch.bfloat16
INT = torch.int32
BLOCK, HEAD, HEADS, KV_HEADS = 64, 128, 32, 8
ROTATED_BYTES = 512 << 20
HOST_CALLS = 200


class Work(NamedTuple):
    name: str
    bytes: int
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    sets: list[tuple[Any, ...]]
    bar: float | None = 0.93  # of copy


def sets_of(make: Callable[[], tuple[Any, ...]], size: int, device: torch.device) -> list[Any]:
    count = min(-(-ROTATED_BYTES // size), 32) if device.type == "cuda" else 2
    return [make() for _ in range(count)]


def plain_rotary(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor,
    sequences: Tensor, positions: Tensor,
) -> Tensor:  # fmt: skip
    pairs = q.shape[2] // 2
    steps = torch.arange(pairs, device=q.device, dtype=torch.float32)
    angle = positions.float()[:, None, None] * 10000.0 ** (-steps / pairs)
    c, s = angle.cos(), angle.sin()

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    plain_copy(turned(k), v, k_cache, v_cache, table, sequences, positions)
    return turned(q)


def plain_copy(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, sequences: Tensor,
    positions: Tensor,
) -> None:  # fmt: skip
    size = k_cache.shape[1]
    block, place = table[sequences, positions // size], positions % size
    k_cache[block, place] = k
    v_cache[block, place] = v


def plain_gating(logits: Tensor, k: int) -> tuple[Tensor, ...]:
    weights, experts = logits.float().softmax(1).topk(k, 1)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=order.device)
    return weights, experts, slots, counts.scatter_add(0, flat, torch.ones_like(flat))


def plain_scatter(x: Tensor, slots: Tensor) -> Tensor:
    out = x.new_empty(slots.numel(), x.shape[1])
    out[slots.flatten()] = x.repeat_interleave(slots.shape[1], 0)
    return out


def plain_gather(rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    return (rows[slots].float() * weights[:, :, None]).sum(1).to(rows.dtype)


def plain_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.embedding(tokens, weight)


def plain_last(x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    return x[starts + lengths - 1]


def works(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Work]:
    kind = f"{str(dtype).removeprefix('torch.')}, {tokens} tokens"
    bar = 0.93 if tokens * columns >= 2**26 else None

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    sequences = max(1, tokens // 512)
    share = -(-tokens // sequences)
    at = torch.arange(tokens, device=device)
    blocks = -(-share // BLOCK)
    table = torch.randperm(sequences * blocks, device=device).view(sequences, blocks).to(INT)
    index = (table, (at // share).to(INT), (at % share).to(INT))

    def cached() -> tuple[Tensor, ...]:
        k, v = random(tokens, KV_HEADS, HEAD), random(tokens, KV_HEADS, HEAD)
        return k, v, *(random(sequences * blocks, BLOCK, KV_HEADS, HEAD) for _ in range(2)), *index

    def rotated() -> tuple[Tensor, ...]:
        return random(tokens, HEADS, HEAD), *cached()

    row = columns * dtype.itemsize
    kv_bytes = 4 * tokens * KV_HEADS * HEAD * dtype.itemsize
    q_bytes = 2 * tokens * HEADS * HEAD * dtype.itemsize
    out = []

    def add(name: str, size: int, ours: Any, plain: Any, make: Any, least: float | None) -> None:
        sets = sets_of(make, size, device)
        out.append(Work(f"{name} {kind}", size, ours, plain, sets, least))

    add("paged_kv_rotary", q_bytes + kv_bytes, ragged.paged_kv_rotary, plain_rotary, rotated, bar)
    add("paged_kv_copy", kv_bytes, ragged.paged_kv_copy, plain_copy, cached, bar)
    for k in (2, 8):
        logits = torch.randn(tokens, 64, device=device)
        weights, _, slots, *_ = ragged.top_k_gating(logits, k)
        size = (k + 1) * tokens * row
        add(f"moe_scatter k={k}", size, ragged.moe_scatter, plain_scatter,
            lambda s=slots: (random(tokens, columns), s), bar)  # fmt: skip
        add(f"moe_gather k={k}", size, ragged.moe_gather, plain_gather,
            lambda s=slots, w=weights: (random(w.numel(), columns), s, w), bar)  # fmt: skip
        add(f"top_k_gating 64 experts k={k}", tokens * (64 * dtype.itemsize + 12 * k),
            ragged.top_k_gating, plain_gating,
            lambda k=k: (random(tokens, 64), k), None)  # fmt: skip
    words = 32000 if device.type == "cuda" else 320
    weight = random(words, columns)
    add("ragged_embedding", 2 * tokens * row, ragged.ragged_embedding, plain_embedding,
        lambda: (torch.randint(words, (tokens,), device=device), weight), bar)  # fmt: skip
    lengths = torch.full((sequences,), share, device=device, dtype=INT)
    starts = torch.arange(sequences, device=device, dtype=INT) * share
    lengths[-1] = tokens - int(starts[-1])
    add("logits_gather", 2 * sequences * row, ragged.logits_gather, plain_last,
        lambda: (random(tokens, columns), starts, lengths), None)  # fmt: skip
    return out


def rows_of(work: Work, device: torch.device, repeats: int, compiled: bool) -> list[Row]:
    calls = {"opkiln": work.ours, "torch eager": work.plain}
    if compiled:
        torch._dynamo.reset()
        calls["torch.compile"] = torch.compile(work.plain, dynamic=False)

    def through(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for each in work.sets:
                call(*each)

        return run

    turns = measured({name: through(call) for name, call in calls.items()}, device, repeats)
    count = len(work.sets)
    return [
        Row(work.name, name, work.bytes, taken.ms / count, taken.host_ms / count)
        for name, taken in turns.items()
    ]


def host_rows(made: list[Work], device: torch.device) -> list[Row]:
    """The time until a call returns, many in a row. Nobody waits for the GPU meanwhile."""
    x = torch.randn(64, 4096, device=device)
    calls: dict[str, Callable[[], Any]] = {"x + x": lambda: x + x}
    calls |= {work.name: lambda w=work: w.ours(*w.sets[0]) for work in made}
    rows = []
    for name, call in calls.items():
        for timed in (False, True):
            began = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            taken = (time.perf_counter() - began) / HOST_CALLS * 1e3
            if device.type == "cuda":
                torch.cuda.synchronize()
            if timed:
                rows.append(Row("host time of a call", name, 0, taken, taken))
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    made.add_argument("--no-compile", action="store_true", help="without torch.compile")
    asked = made.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not asked.tiny else "cpu")
    bandwidth = 1e10 if asked.tiny else copy_bandwidth(device)
    rows: list[Row] = []
    bars: list[Bar] = []
    sizes = ((16, 64),) if asked.tiny else ((16384, 4096), (64, 4096))
    few: list[Work] = []
    for tokens, columns in sizes:
        for dtype in (BF16, F16):
            found = [w for w in works(tokens, columns, dtype, device) if asked.only in w.name]
            for work in found:
                # Compiling takes seconds: once for each function with a bar.
                compiled = dtype == BF16 and work.bar is not None and "k=8" not in work.name
                compiled = compiled and not asked.no_compile
                rows += rows_of(work, device, 2 if asked.tiny else 10, compiled)
                if work.bar is not None:
                    bars.append(Bar(work.name, "opkiln", None, work.bar))
                    bars.append(Bar(work.name, "opkiln", "torch.compile", 0.97))
            if tokens <= 64 and dtype == BF16:
                few = found
    rows += host_rows(few, device)
    report(rows, bandwidth, asked.out, commit=asked.commit)
    missed(bars, rows, bandwidth)


if __name__ == "__main__":
    main()
