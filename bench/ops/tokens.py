"""random_ltd and spatial_inference beside torch and torch.compile, as a share of the copy.

    PYTHONPATH=src python bench/ops/tokens.py [--only WORD] [--out FILE] [--tiny]

On a GPU 32768 x 4096, 65536 x 1024 and 64 x 4096 numbers in sequences of 2048 tokens, of which half
are kept, and images of 64 x 320 x 64 x 64 with channels last; in bf16 and fp16. Each call has other
tensors, so that no cache has them. For 64 x 4096 the host's time of a call counts, too, beside that
of an eager ``x + x``. On the CPU 2048 x 4096 numbers. Bytes are those that must be moved.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Bar, Row
from torch import Tensor

from opkiln.nn import random_ltd, spatial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROTATED = 512 << 20  # bytes of the tensors that calls take turns with
SMALL = (1, 64, 4096)


class Work(NamedTuple):
    """``inputs(shape, dtype, device)`` are the arguments of a call; ``traffic`` its bytes, in
    tensors of the shape."""

    name: str
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    inputs: Callable[..., list[Tensor]]
    traffic: float
    images: bool = False


def _tokens(*parts: str) -> Callable[..., list[Tensor]]:
    def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        batch, count, channels = shape
        drawn = torch.rand(batch, count, device=device).argsort(-1)[:, : count // 2]
        made = {
            "x": torch.randn(batch, count, channels, device=device, dtype=dtype),
            "part": torch.randn(batch, count // 2, channels, device=device, dtype=dtype),
            "indices": drawn.sort(-1).values.int(),
        }
        return [made[each] for each in parts]

    return inputs


def _images(*parts: str) -> Callable[..., list[Tensor]]:
    def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        def image() -> Tensor:
            made = torch.randn(*shape, device=device, dtype=dtype)
            return made.to(memory_format=torch.channels_last) if len(shape) == 4 else made

        channels = shape[1] if len(shape) == 4 else shape[-1]
        return [
            image() if each in ("x", "other") else torch.randn(channels, device=device, dtype=dtype)
            for each in parts
        ]

    return inputs


def _rows(indices: Tensor) -> Tensor:
    return torch.arange(len(indices), device=indices.device)[:, None]


def _torch_gather(x: Tensor, indices: Tensor) -> Tensor:
    return x[_rows(indices), indices]


def _torch_scatter(x: Tensor, part: Tensor, indices: Tensor) -> Tensor:
    out = x.clone()
    out[_rows(indices), indices] = part
    return out


def _torch_scatter_(x: Tensor, part: Tensor, indices: Tensor) -> None:
    x[_rows(indices), indices] = part


def _column(bias: Tensor, x: Tensor) -> Tensor:
    return bias.view(-1, 1, 1) if x.dim() == 4 else bias


def _torch_add(
    x: Tensor, bias: Tensor, other: Tensor | None = None, more: Tensor | None = None
) -> Tensor:
    out = x + _column(bias, x)
    if other is None:
        return out
    return out + (other if more is None else other + _column(more, x))


WORKS = (
    Work("gather", random_ltd.token_gather, _torch_gather, _tokens("x", "indices"), 1.0),
    Work(
        "scatter",
        random_ltd.token_scatter,
        _torch_scatter,
        _tokens("x", "part", "indices"),
        2.0,
    ),
    Work(
        "scatter in place",
        random_ltd.token_scatter_,
        _torch_scatter_,
        _tokens("x", "part", "indices"),
        1.0,
    ),
    Work("bias", spatial.spatial_bias_add, _torch_add, _images("x", "bias"), 2.0, images=True),
    Work(
        "bias and residual",
        spatial.spatial_bias_add,
        _torch_add,
        _images("x", "bias", "other"),
        3.0,
        images=True,
    ),
    Work(
        "biases and residual",
        spatial.spatial_bias_add,
        _torch_add,
        _images("x", "bias", "other", "other_bias"),
        3.0,
        images=True,
    ),
)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small tensors: whether it runs")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    random_ltd.token_gather.load(device.type)
    spatial.spatial_bias_add.load(device.type)
    bandwidth = harness.copy_bandwidth(device)
    shapes: list[tuple[int, ...]] = [(1, 2048, 4096)]
    if on_gpu:
        shapes = [(16, 2048, 4096), (32, 2048, 1024), SMALL, (64, 320, 64, 64)]
    if options.tiny:
        shapes = [(2, 16, 64), (2, 8, 4, 4)]
    rows: list[Row] = []
    bars: list[Bar] = []
    dtypes = (torch.bfloat16, torch.float16) if on_gpu else (torch.bfloat16, torch.float32)
    for shape, dtype, work in itertools.product(shapes, dtypes, WORKS):
        if options.only in work.name and (len(shape) == 3 or work.images):
            found, asked = _measured(work, shape, dtype, device, options.tiny)
            rows += found
            bars += asked
            torch.compiler.reset()
    rows += _masks(device, options.tiny) if options.only in "masks" else []
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    _tell_small(rows)
    if not options.tiny:
        harness.missed(bars, rows, bandwidth)


def _measured(
    work: Work, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, tiny: bool
) -> tuple[list[Row], list[Bar]]:
    on_gpu, small = device.type == "cuda", shape == SMALL
    first = work.inputs(shape, dtype, device)
    sets = max(2, min(256, ROTATED // sum(each.nbytes for each in first))) if not tiny else 2
    turns = itertools.cycle(
        [first, *(work.inputs(shape, dtype, device) for _ in range(sets - 1))]
    )  # fmt: skip
    calls = 1 if not on_gpu else 32 if small else 4

    def repeated(function: Callable[..., Any]) -> Callable[[], None]:
        def call() -> None:
            for _ in range(calls):
                function(*next(turns))

        return call

    fns = {"opkiln": repeated(work.ours), "torch": repeated(work.torch)}
    if on_gpu and dtype == torch.bfloat16:  # compiling takes longer than all the rest
        fns["torch compiled"] = repeated(torch.compile(work.torch, dynamic=False))
    if small:
        fns["x + x"] = repeated(lambda x, *_: x + x)
    kind = str(dtype).removeprefix("torch.")
    name = f"{work.name}, {' x '.join(map(str, shape))}, {kind}"
    traffic = int(first[0].nbytes * work.traffic)
    with torch.no_grad():
        times = harness.measured(fns, device, 2 if tiny else 11)
    found = [
        Row(name, who, traffic, time.ms / calls, time.host_ms / calls)
        for who, time in times.items()
    ]
    bars = [] if small else [Bar(name, "opkiln", None, 0.93 if on_gpu else 0.9)]
    bars.append(Bar(name, "opkiln", "torch compiled" if on_gpu else "torch", 0.97))
    return found, bars


def _masks(device: torch.device, tiny: bool) -> list[Row]:
    """Masks of half of the tokens for four layers, and the indices themselves."""
    batch, count, layers = (2, 32, 2) if tiny else (8, 2048, 4)
    if device.type == "cpu" and not tiny:
        batch = 1
    mask = torch.randn(batch, 1, count, count, device=device, dtype=torch.bfloat16)
    drawn = torch.rand(layers, batch, count, device=device).argsort(-1)[..., : count // 2].int()
    indices = drawn.sort(-1).values

    def by_torch() -> Tensor:
        rows = torch.arange(batch, device=device)[:, None, None]
        places = indices.long()
        return torch.stack(
            [mask[rows, 0, at[:, :, None], at[:, None, :]][:, None] for at in places]
        )

    written = layers * batch * (count // 2) ** 2 * mask.element_size()
    works: dict[str, tuple[int, dict[str, Callable[[], Any]]]] = {
        "bert masks": (
            mask.nbytes + written,
            {"opkiln": lambda: random_ltd.mask_gather_bert(mask, indices), "torch": by_torch},
        ),
        "gpt mask": (
            2 * written // layers,
            {
                "opkiln": lambda: random_ltd.mask_gather_gpt(mask, count // 2),
                "torch": mask[:, :, : count // 2, : count // 2].contiguous,
            },
        ),
        "sort": (
            2 * drawn.nbytes,
            {
                "opkiln": lambda: random_ltd.token_sort(drawn, count),
                "torch": lambda: drawn.sort(-1).values,
            },
        ),
    }
    found = []
    for name, (traffic, fns) in works.items():
        for who, time in harness.measured(fns, device, 2 if tiny else 11).items():
            found.append(Row(f"{name}, {batch} x {count}", who, traffic, time.ms, time.host_ms))
    return found


def _tell_small(rows: list[Row]) -> None:
    """The bars of 64 x 4096: time on the GPU, and the host's time of a call."""
    found = {(row.work, row.who): row for row in rows}
    for (work, who), plain in found.items():
        if who != "x + x":
            continue
        ours, compiled = found[work, "opkiln"], found.get((work, "torch compiled"))
        assert ours.host_ms is not None
        assert plain.host_ms is not None
        most = max(0.0035, 1.1 * compiled.ms) if compiled else 0.0035
        for good, text in (
            (ours.ms <= most, f"{ours.ms * 1e3:.2f} us, bar {most * 1e3:.2f} us"),
            (
                ours.host_ms <= 1.3 * plain.host_ms,
                f"host {ours.host_ms / plain.host_ms:.2f} of x + x, bar 1.3",
            ),
        ):
            print(f"{'ok      ' if good else 'MISSED  '}{work}: {text}")


if __name__ == "__main__":
    main()
