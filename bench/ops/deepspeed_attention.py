"""Decode attention beside DeepSpeed's ``softmax_context``: one new token, caches that take turns.

DeepSpeed keeps the caches of all layers in one workspace; here each layer of it is one cache. It
stores a kv head once for each query head. The workspace also has room for all scores of a prompt as
long as the context, so that long contexts of many sequences find no room on any GPU.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import harness
import torch
from deepspeed_compared import NAMES, Found, apart, failing
from harness import Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from opkiln.nn.inference import KVCache, attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deepspeed_compared import Modules

HEADS, HEAD = 32, 128
ROTATED = 256 << 20  # bytes of caches that take turns, at least
SIZES = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (64, 1024))
LARGEST_PROMPT = 1 << 30  # scores that its softmax can count with 32 bits


class Cell(NamedTuple):
    batch: int
    kv_heads: int
    context: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        kind = NAMES[self.dtype]
        return f"decode, batch {self.batch}, {self.kv_heads} kv heads, {self.context}, {kind}"

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.context * HEAD * self.dtype.itemsize

    @property
    def caches(self) -> int:
        return -(-ROTATED // self.bytes)

    @property
    def calls(self) -> int:
        return max(1, min(16, ROTATED // self.bytes))


def cells(tiny: bool) -> Iterator[Cell]:
    for dtype, kv_heads in itertools.product(NAMES, (32, 8)):
        for batch, context in ((2, 32),) if tiny else SIZES:
            yield Cell(batch, kv_heads, context, dtype)
    if not tiny:
        yield Cell(8, 32, 32768, torch.bfloat16)  # why DeepSpeed does not serve it


def compared(cell: Cell, modules: Modules, device: torch.device, repeats: int) -> Found:
    """As ``deepspeed_compared.compared``. The bytes are those of the keys and values, each once."""
    count = cell.caches if device.type == "cuda" else 2
    shape = (cell.batch, cell.kv_heads, cell.context, HEAD)
    lengths = torch.full((cell.batch,), cell.context - 1, dtype=torch.int32, device=device)
    empty = partial(torch.empty, dtype=cell.dtype, device=device)
    caches = [
        KVCache(empty(shape).normal_(), empty(shape).normal_(), lengths) for _ in range(count)
    ]
    q, k, v = (
        empty(cell.batch, heads, 1, HEAD).normal_()
        for heads in (HEADS, cell.kv_heads, cell.kv_heads)
    )
    exact = _exact(q, k, v, caches[0])
    found = Found()
    bound: dict[str, list[Callable[[], Tensor]]] = {}
    by_who: dict[str, Callable[[], list[Callable[[], Tensor]]]] = {
        "opkiln": lambda: [partial(attention, q, k, v, c, context=cell.context) for c in caches],
        "DeepSpeed": lambda: _theirs(modules("transformer_inference"), cell, caches, (q, k, v)),
    }
    for who, make in by_who.items():
        with failing(cell.name, who, found):
            calls = make()
            found.errors[who] = apart(calls[0]().reshape(exact.shape), exact)
            bound[who] = calls
    for who, time in harness.rotated(bound, cell.calls, device, repeats).items():
        found.rows.append(Row(cell.name, who, cell.bytes, *time))
    if "DeepSpeed" in bound:
        modules("transformer_inference").release_workspace()
    return found


def _exact(q: Tensor, k: Tensor, v: Tensor, cache: KVCache) -> Tensor:
    """In float32, with the new token in its place."""
    keys, values = cache.k.float(), cache.v.float()
    keys[:, :, -1:], values[:, :, -1:] = k.float(), v.float()
    return scaled_dot_product_attention(q.float(), keys, values, enable_gqa=True)


def _theirs(
    module: Any, cell: Cell, caches: list[KVCache], new: tuple[Tensor, Tensor, Tensor]
) -> list[Callable[[], Tensor]]:
    """A call for each layer of the workspace, which is filled with what is in the caches."""
    kind, layers = NAMES[cell.dtype], len(caches) + 1  # the token counts stay if no layer is last
    torch.cuda.empty_cache()
    getattr(module, f"allocate_workspace_{kind}")(
        HEADS * HEAD, HEADS, cell.context, cell.batch, layers, 1, False, 1, cell.context,
        cell.context,
    )  # fmt: skip
    context = getattr(module, f"softmax_context_{kind}")
    none = torch.empty(1, dtype=cell.dtype, device=new[0].device)

    def call(qkv: Tensor, heads: int, kv_heads: int, layer: int) -> list[Tensor]:
        return context(
            qkv, none, -1, False, False, heads, kv_heads, HEAD**-0.25, True, False, 1, True, layer,
            layers, none, 10000.0, False, None, None,
        )  # fmt: skip

    # A prompt sets the number of tokens. One head of one sequence does, where all have too many
    # scores for its kernels.
    one = cell.batch * HEADS * cell.context**2 > LARGEST_PROMPT
    batch, heads, kv_heads = (1, 1, 1) if one else (cell.batch, HEADS, cell.kv_heads)
    prompt = none.new_zeros(batch, cell.context, (heads + 2 * kv_heads) * HEAD)
    for layer in range(1 if one else len(caches)):
        call(prompt, heads, kv_heads, layer)
    del prompt
    qkv = torch.cat([each.transpose(1, 2).flatten(2) for each in new], -1)
    for layer, cache in enumerate(caches):
        _, keys, values = call(qkv, HEADS, cell.kv_heads, layer)
        for theirs, ours in ((keys, cache.k), (values, cache.v)):
            theirs.copy_(ours.repeat_interleave(HEADS // cell.kv_heads, 1))
    return [
        lambda layer=layer: call(qkv, HEADS, cell.kv_heads, layer)[0]
        for layer in range(len(caches))
    ]
