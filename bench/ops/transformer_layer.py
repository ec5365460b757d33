"""A training layer beside torch eager and torch.compile: time and peak memory; and its kernels.

    PYTHONPATH=src python bench/ops/transformer_layer.py [--only WORD] [--out FILE] [--tiny]

Forward and backward of one pre-norm layer with gelu and dropout of 0.1, bf16 on a GPU. The layer of
torch has the same parameters, matrix products and attention. Bytes of a layer's row are those of
its parameters and input, so only its milliseconds mean something; the peak is what a step takes
beyond them. Rows of kernels are of the share of the copy's bandwidth, each call with other tensors.
``--tiny`` is small, and runs on the CPU too.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from harness import Bar, Row
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, layer_norm, linear, scaled_dot_product_attention

from opkiln.nn import TransformerLayer
from opkiln.ops.transformer import functions

if TYPE_CHECKING:
    from collections.abc import Callable

P = 0.1
ROTATED = 512 << 20  # bytes of the tensors that a kernel's calls take turns with


class Size(NamedTuple):
    hidden: int
    sequence: int
    batch: int

    @property
    def heads(self) -> int:
        return max(1, self.hidden // (128 if self.hidden >= 4096 else 64))

    def __str__(self) -> str:
        return f"{self.hidden} x {self.sequence} x {self.batch}"


class Plain(nn.Module):
    """The layer as one would write it with torch, on the parameters of ours."""

    def __init__(self, of: TransformerLayer, p: float = P) -> None:
        super().__init__()
        self.of, self.p = of, p

    def forward(self, x: Tensor) -> Tensor:
        of, wide = self.of, (self.of.hidden,)
        normal = layer_norm(x, wide, of.attention_norm_weight, of.attention_norm_bias, of.eps)
        parts = linear(normal, of.qkv_weight, of.qkv_bias).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (of.heads, -1)).transpose(1, 2) for each in parts)
        attended = scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        attended = attended.transpose(1, 2).flatten(2)
        x = x + dropout(linear(attended, of.out_weight, of.out_bias), self.p)
        normal = layer_norm(x, wide, of.mlp_norm_weight, of.mlp_norm_bias, of.eps)
        active = gelu(linear(normal, of.up_weight, of.up_bias), approximate="tanh")
        return x + dropout(linear(active, of.down_weight, of.down_bias), self.p)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="small tensors, few turns")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no GPU; --tiny runs on the CPU")
    sizes = [Size(64, 8, 2)] if options.tiny else [Size(1024, 512, 32), Size(4096, 2048, 4)]
    bandwidth = 1e9 if options.tiny else harness.copy_bandwidth(device)
    repeats = 2 if options.tiny else 15
    rows, bars = [], []
    for size in sizes:
        for measure in (layer_rows, kernel_rows):
            found, wanted = measure(size, device, repeats, options.only)
            rows += found
            bars += wanted
    harness.report(rows, bandwidth, options.out, commit=options.commit)
    harness.missed(bars, rows, bandwidth)


def layer_rows(
    size: Size, device: torch.device, repeats: int, only: str
) -> tuple[list[Row], list[Bar]]:
    name = f"layer {size}"
    if only not in name:
        return [], []

    def made(**words: Any) -> TransformerLayer:
        return TransformerLayer(
            size.hidden, size.heads, device=device, dtype=torch.bfloat16, **words
        )

    ours = made()
    keeping = made(normalize_invertible=False, gelu_checkpoint=False)
    relaxed = made(stochastic=True)
    shape = (size.batch, size.sequence, size.hidden)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def step(module: nn.Module, parameters: nn.Module) -> Callable[[], None]:
        wanted = [x, *parameters.parameters()]
        return lambda: _take(torch.autograd.grad(module(x), wanted, grad))

    fns = {
        "opkiln": step(ours, ours),
        "opkiln, norms and gelu kept": step(keeping, keeping),
        "opkiln, stochastic": step(relaxed, relaxed),
        "torch": step(Plain(ours), ours),
    }
    if device.type == "cuda":
        fns["torch compiled"] = step(torch.compile(Plain(ours), dynamic=False), ours)
    times = harness.measured(fns, device, repeats)
    kept = x.nbytes + sum(each.nbytes for each in ours.parameters())
    if device.type == "cuda":
        _tell_peaks(name, fns)
    rows = [Row(name, who, kept, time.ms, time.host_ms) for who, time in times.items()]
    return rows, [Bar(name, "opkiln", "torch compiled", 1.0)]


def _take(grads: tuple[Tensor, ...]) -> None:
    """A step's gradients are dropped at once, as an optimizer would use them up."""


def _tell_peaks(name: str, fns: dict[str, Callable[[], None]]) -> None:
    peaks = {}
    for who, fn in fns.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        peaks[who] = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"{name}: peak of {who}: {peaks[who]:.0f} MiB")
    verdict = "ok      " if peaks["opkiln"] < peaks["torch"] else "MISSED  "
    print(f"{verdict}{name}: peak {peaks['opkiln'] / peaks['torch']:.3f} of torch, bar 1")


def kernel_rows(
    size: Size, device: torch.device, repeats: int, only: str
) -> tuple[list[Row], list[Bar]]:
    tokens, hidden = size.sequence * size.batch, size.hidden
    seed = torch.tensor([7], device=device)

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    row, wide_row = tensor(hidden), tensor(4 * hidden)
    mean, scale = tensor(tokens, dtype=torch.float32), tensor(tokens, dtype=torch.float32)
    # name -> (tensors read, tensors written, columns, the call)
    works: dict[str, tuple[int, int, int, Callable[..., Any]]] = {
        "norm": (1, 1, hidden, lambda x: functions.norm_with_moments(x, row, row)),
        "dropout, add": (
            2, 1, hidden, lambda x, y: functions.dropout_add(x, row, y, seed, 0, P),
        ),
        "dropout, add, norm": (
            2, 2, hidden, lambda x, y: functions.dropout_add_norm(x, row, y, row, row, seed, 0, P),
        ),
        "dropout, add, backward": (
            1, 1, hidden, lambda x: functions.dropout_add_backward(x, seed, 0, P),
        ),
        "dropout, add, norm, backward": (
            3, 2, hidden,
            lambda g, x, r: functions.dropout_add_norm_backward(
                g, x, mean, scale, row, None, r, seed, 0, P
            ),
        ),
        "gelu": (1, 1, 4 * hidden, lambda x: functions.gelu_dropout(x, wide_row)),
        "gelu, backward": (
            2, 1, 4 * hidden, lambda g, x: functions.gelu_dropout_backward(g, x, wide_row),
        ),
        "join": (3, 3, hidden, functions.join_columns),
    }  # fmt: skip
    rows, bars = [], []
    for name, (read, written, columns, call) in works.items():
        work = f"{name}, {tokens} x {columns}"
        if only not in work:
            continue
        one = 2 * tokens * columns
        count = 1 if device.type == "cpu" else -(-ROTATED // (one * read))
        turns = itertools.cycle(
            [[tensor(tokens, columns) for _ in range(read)] for _ in range(count)]
        )
        calls = 1 if device.type == "cpu" else 8

        def several(
            call: Callable[..., Any] = call, turns: Any = turns, calls: int = calls
        ) -> None:
            for _ in range(calls):
                call(*next(turns))

        with torch.no_grad():
            ms = harness.timed({"opkiln": several}, device, repeats)["opkiln"] / calls
        rows.append(Row(work, "opkiln", one * (read + written), ms))
        bars.append(Bar(work, "opkiln", None, 0.9))
    return rows, bars


if __name__ == "__main__":
    main()
