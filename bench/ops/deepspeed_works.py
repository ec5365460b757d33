"""The works in which opkiln's ops and DeepSpeed's kernels do the same, at the sizes of the bars.

DeepSpeed's ``transformer_inference`` serves bf16 and fp16. Its rotary embedding and
``spatial_inference`` read every dtype as fp16, so they have rows for that alone. "DeepSpeed
FastGen" is its ``inference_core_ops``. Some of its kernels write over their input where ours give a
new tensor: the bytes are the same.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed_compared import NAMES, Side, Work, ours
from torch import Tensor
from torch.nn import functional

from opkiln.nn import inference, random_ltd, spatial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RMS_EPS, EPS = 1e-6, 1e-5
GATED_SILU, GELU, SIGLU = 4, 0, 5  # DeepSpeed's numbers for activations; FastGen's for the last two
_theirs = partial(Side, module="transformer_inference")
_fastgen = partial(Side, module="inference_core_ops")


def row_works(device: torch.device, tiny: bool) -> Iterator[Work]:
    """Norms, activations and residual adds."""
    shapes = [(8, 256)] if tiny else [(32768, 4096), (65536, 1024), (64, 4096)]
    for shape, dtype in itertools.product(shapes, NAMES):
        yield from _of_rows(shape, dtype, device)


def _of_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Iterator[Work]:
    kind = NAMES[dtype]
    row = [torch.randn(shape[1], device=device, dtype=dtype) for _ in range(3)]
    wide = [each.float() for each in row]
    zeros = torch.zeros(shape[1], device=device, dtype=dtype)

    def work(
        name: str, tensors: int, written: float, sides: dict[str, Side], reference: Any
    ) -> Work:
        def make() -> list[Tensor]:
            return [torch.randn(1, *shape, device=device, dtype=dtype) for _ in range(tensors)]

        size = int(shape[0] * shape[1] * dtype.itemsize * (tensors + written))
        return Work(
            f"{name}, {shape[0]} x {shape[1]}, {kind}", size, make, sides, reference
        )  # fmt: skip

    yield work(
        "rms norm", 1, 1,
        {
            "opkiln": ours(lambda x: inference.rms_norm(x, row[0], RMS_EPS)),
            "DeepSpeed": _theirs(lambda m, x: m.rms_norm(x, row[0], RMS_EPS)),
            "DeepSpeed FastGen": _fastgen(
                lambda m, x: _filled(x, lambda out: m.rms_norm(out[0], x[0], row[0], RMS_EPS))
            ),
        },
        lambda x: inference.rms_norm.reference(x, wide[0], RMS_EPS),
    )  # fmt: skip
    yield work(
        "layer norm", 1, 1,
        {
            "opkiln": ours(lambda x: inference.layer_norm(x, row[0], row[1], EPS)),
            "DeepSpeed": _theirs(lambda m, x: m.layer_norm(x, row[0], row[1], EPS)),
            "DeepSpeed FastGen": _fastgen(
                lambda m, x: _filled(x, lambda out: m.layer_norm(out, x, row[0], row[1], EPS))
            ),
        },
        lambda x: inference.layer_norm.reference(x, wide[0], wide[1], EPS),
    )  # fmt: skip
    yield work(
        "add and rms norm", 2, 2,
        {
            "opkiln": ours(lambda x, r: inference.pre_rms_norm(x, r, row[0], None, RMS_EPS)),
            "DeepSpeed": _theirs(lambda m, x, r: m.pre_rms_norm(x, r, row[0], RMS_EPS)),
            "DeepSpeed FastGen": _fastgen(
                lambda m, x, r: _filled_both(
                    x, lambda n, s: m.rms_pre_norm(n[0], s[0], x[0], r[0], row[0], RMS_EPS)
                )
            ),
        },
        lambda x, r: inference.pre_rms_norm.reference(x, r, wide[0], None, RMS_EPS),
    )  # fmt: skip
    yield work(
        "add, bias and layer norm", 2, 2,
        {
            "opkiln": ours(
                lambda x, r: inference.pre_layer_norm(x, r, row[0], row[1], row[2], EPS)
            ),
            "DeepSpeed": _theirs(
                lambda m, x, r: m.layer_norm_residual_store_pre_ln_res(
                    x, row[2], r, row[0], row[1], EPS
                )
            ),
        },
        lambda x, r: inference.pre_layer_norm.reference(x, r, *wide, EPS),
    )  # fmt: skip
    yield work(
        "bias and gelu", 1, 1,
        {
            "opkiln": ours(lambda x: inference.bias_gelu(x, row[0])),
            "DeepSpeed": _theirs(lambda m, x: getattr(m, f"bias_gelu_{kind}")(x, row[0])),
            "DeepSpeed FastGen": _fastgen(
                lambda m, x: (m.bias_activation(x[0], row[0], GELU), x)[1]
            ),
        },
        lambda x: functional.gelu(x + wide[0], approximate="tanh"),
    )  # fmt: skip
    yield work(
        "gated silu", 1, 0.5,
        {
            "opkiln": ours(lambda x: inference.gated_silu(x, gate_first=False)),
            "DeepSpeed": _theirs(lambda m, x: m.gated_activation(x, zeros, GATED_SILU)),
        },
        lambda x: inference.gated_silu.reference(x, gate_first=False),
    )  # fmt: skip
    yield work(
        "gated silu, interleaved", 1, 0.5,
        {
            "opkiln": ours(lambda x: inference.gated_silu(x, interleaved=True)),
            "DeepSpeed FastGen": _fastgen(
                lambda m, x: _filled(
                    x[..., ::2], lambda out: m.gated_activation(out[0], x[0], None, SIGLU)
                )
            ),
        },
        lambda x: inference.gated_silu.reference(x, interleaved=True),
    )  # fmt: skip

    def residual(after: bool) -> dict[str, Side]:
        return {
            "opkiln": ours(
                lambda h, r, a: inference.residual_add(
                    h, r, a, row[0], row[1], 0.5, 0.5 if after else 1.0
                )
            ),
            "DeepSpeed": _theirs(
                lambda m, h, r, a: getattr(m, f"residual_add_bias_{kind}")(
                    h, r, a, row[1], row[0], 2, after, True, True
                )
            ),
        }

    for name, after in (("residual, parallel attention", False), ("residual, MLP after", True)):
        yield work(
            name, 3, 1, residual(after),
            lambda h, r, a, after=after: inference.residual_add.reference(
                h, r, a, wide[0], wide[1], 0.5, 0.5 if after else 1.0
            ),
        )  # fmt: skip


def _filled(like: Tensor, fill: Callable[[Tensor], None]) -> Tensor:
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    fill(out)
    return out


def _filled_both(like: Tensor, fill: Callable[[Tensor, Tensor], None]) -> tuple[Tensor, Tensor]:
    outs = torch.empty_like(like), torch.empty_like(like)
    fill(*outs)
    return outs


def score_works(device: torch.device, tiny: bool) -> Iterator[Work]:
    """Softmax and rotary embedding."""
    for dtype in NAMES:
        shapes = [(4096, 1, 32, 1024), (4096, 1, 1, 32_768), (64, 1, 1, 4096)]
        for shape in [(2, 2, 4, 64)] if tiny else shapes:
            yield _softmax(shape, dtype, device, masked=False)
        masked = (2, 2, 4, 64) if tiny else (16, 32, 256, 1024)
        yield _softmax(masked, dtype, device, masked=True)
    shapes = [(2, 8, 4, 64)] if tiny else [(8, 4096, 32, 128), (1, 64, 32, 128)]
    for shape in shapes:
        yield _rotary(shape, device)


def _softmax(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, masked: bool
) -> Work:
    kind, scale = NAMES[dtype], 0.125 if masked else 1.0
    none = torch.empty(1, device=device, dtype=dtype)
    mask = torch.randn(shape[0], 1, 1, shape[-1], device=device, dtype=dtype) if masked else None

    def theirs(m: Any, x: Tensor) -> Tensor:
        return getattr(m, f"softmax_{kind}")(
            x, none if mask is None else mask, none, False, False, False, 1, False, scale, 0, 1
        )

    def in_place(x: Tensor) -> Tensor:
        inference.softmax_(x, mask, scale=scale)
        return x

    def reference(x: Tensor) -> Tensor:
        return torch.softmax(x * scale + (0 if mask is None else mask.float()), -1)

    name = f"softmax{', mask and scale' if masked else ''}, {' x '.join(map(str, shape))}, {kind}"
    sides = {
        "opkiln": ours(lambda x: inference.softmax(x, mask, scale=scale)),
        "opkiln, in place": ours(in_place),
        "DeepSpeed": _theirs(theirs),
    }
    return Work(
        name, 2 * torch.Size(shape).numel() * dtype.itemsize,
        lambda: [torch.randn(shape, device=device, dtype=dtype)], sides, reference,
    )  # fmt: skip


def _rotary(shape: tuple[int, int, int, int], device: torch.device) -> Work:
    """Queries and keys together, in place. DeepSpeed's have the tokens of a head side by side, ours
    the heads of a token."""
    batch, tokens, heads, head = shape
    positions = torch.arange(tokens, device=device, dtype=torch.int32)
    flat = (batch, tokens, heads * head)

    def theirs(m: Any, q: Tensor, k: Tensor) -> Any:
        return m.apply_rotary_pos_emb(q, k, head, 0, heads, True, 10000.0)

    def with_room(m: Any, q: Tensor, k: Tensor) -> Any:
        # The kernel takes the distance of two heads from the workspace, which is for so many.
        m.allocate_workspace_fp16(head, 1, tokens, 1, 1, 1, False, 1, tokens, 1)
        return theirs(m, q, k)

    def in_place(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        inference.rotary_qk_(q.view(shape), k.view(shape), positions)
        return q, k

    def exact(*tensors: Tensor) -> list[Tensor]:
        return [inference.rotary.reference(each.view(shape), positions) for each in tensors]

    def exact_by_head(*tensors: Tensor) -> list[Tensor]:
        by_head = (batch, heads, tokens, head)
        turned = [each.view(by_head).transpose(1, 2) for each in tensors]
        return [inference.rotary.reference(x, positions).transpose(1, 2) for x in turned]

    return Work(
        f"rotary of q and k, {' x '.join(map(str, shape))}, fp16",
        8 * torch.Size(shape).numel(),
        lambda: [torch.randn(flat, device=device, dtype=torch.float16) for _ in range(2)],
        {
            "opkiln": ours(in_place),
            "DeepSpeed": Side(with_room, "transformer_inference", exact_by_head),
        },
        exact,
    )


def token_works(device: torch.device, tiny: bool) -> Iterator[Work]:
    """Tokens of random-LTD, and sums of images with channels last."""
    shapes: list[tuple[int, ...]] = [(16, 2048, 4096), (32, 2048, 1024), (1, 64, 4096)]
    if tiny:
        shapes = [(2, 16, 64)]
    for shape, dtype in itertools.product(shapes, NAMES):
        yield from _tokens(shape, dtype, device)
    yield _sort((2, 2, 16) if tiny else (4, 8, 1024), device)
    for shape in [*shapes, (2, 64, 4, 4) if tiny else (64, 320, 64, 64)]:
        yield from _images(shape, device)


def _tokens(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[Work]:
    batch, count, channels = shape
    label = f"{' x '.join(map(str, shape))}, {NAMES[dtype]}"
    size = torch.Size(shape).numel() * dtype.itemsize
    indices = torch.rand(batch, count, device=device).argsort(-1)[:, : count // 2]
    indices = indices.sort(-1).values.int()

    def made(*counts: int) -> Callable[[], list[Tensor]]:
        return lambda: [
            torch.randn(batch, each, channels, device=device, dtype=dtype) for each in counts
        ]

    def scatter_(x: Tensor, part: Tensor) -> Tensor:
        random_ltd.token_scatter_(x, part, indices)
        return x

    yield Work(
        f"token gather, {label}", size, made(count),
        {
            "opkiln": ours(lambda x: random_ltd.token_gather(x, indices)),
            "DeepSpeed": Side(lambda m, x: m.token_gather(x, indices, True), "random_ltd"),
        },
        lambda x: random_ltd.token_gather.reference(x, indices),
    )  # fmt: skip
    yield Work(
        f"token scatter in place, {label}", size, made(count, count // 2),
        {
            "opkiln": ours(scatter_),
            "DeepSpeed": Side(lambda m, x, p: m.token_scatter_(x, p, indices, True), "random_ltd"),
        },
        lambda x, part: random_ltd.token_scatter.reference(x, part, indices),
    )  # fmt: skip


def _sort(shape: tuple[int, int, int], device: torch.device) -> Work:
    count = 2 * shape[-1]

    def make() -> list[Tensor]:
        return [torch.rand(*shape[:2], count, device=device).argsort(-1)[..., : shape[-1]].int()]

    def sort_(drawn: Tensor) -> Tensor:
        random_ltd.token_sort_(drawn, count)
        return drawn

    return Work(
        f"token sort in place, {' x '.join(map(str, shape))} of {count}",
        8 * torch.Size(shape).numel(), make,
        {
            "opkiln": ours(sort_),
            "DeepSpeed": Side(lambda m, drawn: m.token_sort_(drawn, count), "random_ltd"),
        },
        lambda drawn: drawn.sort(-1).values,
    )  # fmt: skip


def _images(shape: tuple[int, ...], device: torch.device) -> Iterator[Work]:
    image = len(shape) == 4
    label = f"{' x '.join(map(str, shape))}, fp16"
    size = 2 * torch.Size(shape).numel()
    channels = shape[1] if image else shape[-1]
    biases = [torch.randn(channels, device=device).half() for _ in range(2)]

    def made(count: int) -> Callable[[], list[Tensor]]:
        layout = torch.channels_last if image else torch.contiguous_format
        return lambda: [
            torch.randn(shape, device=device).half().contiguous(memory_format=layout)
            for _ in range(count)
        ]

    def work(name: str, count: int, function: str, rows: int) -> Work:
        def arguments(tensors: tuple[Tensor, ...], given: list[Tensor]) -> list[Tensor]:
            return [
                t for pair in itertools.zip_longest(tensors, given) for t in pair if t is not None
            ]

        given = biases[:rows]
        wide = [each.float() for each in given]
        return Work(
            f"{name}, {label}", (count + 1) * size, made(count),
            {
                "opkiln": ours(lambda *t: spatial.spatial_bias_add(*arguments(t, given))),
                "DeepSpeed": Side(
                    lambda m, *t: getattr(m, function)(*arguments(t, given)), "spatial_inference"
                ),
            },
            lambda *t: spatial.spatial_bias_add.reference(*arguments(t, wide)),
        )  # fmt: skip

    yield work("bias", 1, "nhwc_bias_add", 1)
    yield work("bias and residual", 2, "nhwc_bias_add_add", 1)
    yield work("biases and residual", 2, "nhwc_bias_add_bias_add", 2)
