"""Every function that takes indices, offsets or lengths, with a right call and the values that each
such argument may have. ``wrong_calls`` makes of it calls with one value that it may not have."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opkiln.ops.kv_attention.functions import kv_attention
from opkiln.ops.mixed_gemm.functions import packed_gemm
from opkiln.ops.mixed_gemm.op import NUMBERS
from opkiln.ops.ragged_device_ops.functions import paged, rows
from opkiln.ops.random_ltd import functions as ltd
from opkiln.ops.transformer_inference.functions.rotary import rotary, rotary_, rotary_qk, rotary_qk_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

LEAST, MOST = -(2**31), 2**31 - 1


class Argument(NamedTuple):
    """One that holds indices: the values that it may have. What has no ``low`` may be negative."""

    name: str
    high: int
    low: int | None = 0


class Indexed(NamedTuple):
    """A function, a right call of it, and which of its arguments hold indices."""

    function: Any
    given: dict[str, Any]
    arguments: tuple[Argument, ...]


class Wrong(NamedTuple):
    """A call with one wrong value, in this argument."""

    function: Any
    given: dict[str, Any]
    name: str
    value: int


def whole(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _indexed() -> Iterator[Indexed]:
    x, part = torch.randn(2, 9, 8), torch.randn(2, 3, 8)
    indices = whole([1, 8, 4], [0, 2, 7])
    within = (Argument("indices", 8),)
    yield Indexed(ltd.token_sort, {"indices": indices, "tokens": 9}, within)
    yield Indexed(
        ltd.token_sort, {"indices": indices, "tokens": 2**20}, (Argument("indices", 2**20 - 1),)
    )
    yield Indexed(ltd.token_sort_, {"indices": indices, "tokens": 9}, within)
    yield Indexed(ltd.token_gather, {"x": x, "indices": indices}, within)
    yield Indexed(ltd.token_scatter, {"x": x, "part": part, "indices": indices}, within)
    yield Indexed(ltd.token_scatter_, {"x": x, "part": part, "indices": indices}, within)
    yield Indexed(ltd.token_spread, {"part": part, "indices": indices, "tokens": 9}, within)
    yield Indexed(ltd.token_clear, {"x": x, "indices": indices}, within)
    mask = torch.randn(2, 1, 9, 9)
    yield Indexed(ltd.mask_gather_bert, {"mask": mask, "indices": indices[None]}, within)

    slots = whole([0, 3], [1, 2])
    once = (Argument("slots", 3),)
    yield Indexed(rows.moe_scatter, {"x": torch.randn(2, 8), "slots": slots}, once)
    yield Indexed(rows.moe_gather, {"rows": torch.randn(4, 8), "slots": slots}, once)
    words = {"tokens": whole(3, 0, 5), "weight": torch.randn(6, 8)}
    yield Indexed(rows.ragged_embedding, words, (Argument("tokens", 5),))
    placed = {**words, "positions": whole(0, 1, 2), "position_weight": torch.randn(4, 8)}
    placed["position_offset"] = 1
    yield Indexed(rows.ragged_embedding, placed, (Argument("positions", 2, -1),))
    last = {"x": torch.randn(6, 8), "starts": whole(2, 2), "lengths": whole(4, 4)}
    yield Indexed(rows.logits_gather, last, (Argument("starts", 2), Argument("lengths", 4, None)))

    k, cache = torch.randn(3, 2, 8), torch.randn(4, 2, 2, 8)
    written = {
        "k": k, "v": k + 1, "k_cache": cache, "v_cache": cache + 1,
        "block_table": whole([2, 0], [3, 1]), "sequences": whole(0, 0, 1),
        "positions": whole(0, 2, 3),
    }  # fmt: skip
    table = Argument("block_table", 3)
    tokens = (Argument("sequences", 1, None), Argument("positions", 3, None))
    yield Indexed(paged.paged_kv_copy, written, tokens)
    rotated = {"q": torch.randn(3, 4, 8), **written}
    yield Indexed(paged.paged_kv_rotary, rotated, tokens)
    # Each block of the table holds a token.
    full = {"positions": whole(0, 2, 0, 2), "sequences": whole(0, 0, 1, 1)}
    written |= full | {"k": torch.randn(4, 2, 8), "v": torch.randn(4, 2, 8)}
    yield Indexed(paged.paged_kv_copy, written, (table,))
    rotated |= written | {"q": torch.randn(4, 4, 8)}
    yield Indexed(paged.paged_kv_rotary, rotated, (table,))
    turned = rotated | {"cos": torch.randn(3, 4), "sin": torch.randn(3, 4)}
    yield Indexed(paged.paged_kv_rotary, turned, (Argument("positions", 2, None),))

    tables = {"cos": torch.randn(3, 4), "sin": torch.randn(3, 4), "positions": whole(0, 2)}
    place = (Argument("positions", 2),)
    heads = torch.randn(2, 3, 8)
    yield Indexed(rotary, {"x": heads, **tables}, place)
    yield Indexed(rotary_, {"x": heads, **tables}, place)
    yield Indexed(rotary_qk, {"q": heads, "k": heads + 1, **tables}, place)
    yield Indexed(rotary_qk_, {"q": heads, "k": heads + 1, **tables}, place)

    new = torch.randn(2, 1, 1, 64, dtype=torch.bfloat16)
    attended = {
        "q": new.expand(2, 4, 1, 64).contiguous(), "k": new, "v": new + 1,
        "k_cache": torch.randn(2, 1, 40, 64).bfloat16(),
        "v_cache": torch.randn(2, 1, 40, 64).bfloat16(),
        "lengths": whole(39, 20), "block_table": None, "slopes": None,
        "counters": torch.zeros(64, dtype=torch.int32), "scale": 0.125, "causal": True, "splits": 2,
    }  # fmt: skip
    yield Indexed(kv_attention, attended, (Argument("lengths", 39),))
    head = torch.randn(2, 1, 1, 80, dtype=torch.float16)
    in_blocks = {
        **attended, "q": head.expand(2, 4, 1, 80).contiguous(), "k": head, "v": head + 1,
        "k_cache": torch.randn(6, 16, 1, 80).half(), "v_cache": torch.randn(6, 16, 1, 80).half(),
        "block_table": whole([5, 1, 2], [0, 3, 4]), "lengths": whole(47, 40),
    }  # fmt: skip
    yield Indexed(kv_attention, in_blocks, (Argument("lengths", 47), Argument("block_table", 5)))

    product = {
        "x": torch.randn(6, 64).half(), "codes": torch.randn(3, 8, 64).half(),
        "scales": None,
        "offsets": whole(2, 4, 6), "bias": None, "outputs": 8, "group_size": 0,
        "form": NUMBERS["plain"], "activation": 0,
    }  # fmt: skip
    # The first may not be above the second, nor the last below it.
    yield Indexed(packed_gemm, product, (Argument("offsets", 6),))


INDEXED = {
    "-".join((each.function.__name__, *(a.name for a in each.arguments), str(number))): each
    for number, each in enumerate(_indexed())
}


def wrong_calls(indexed: Indexed, seed: int = 0) -> Iterator[Wrong]:
    """The call with one value just outside, far outside and at the ends of int32, at a drawn place,
    for each of its arguments, in tensors of their own."""
    draw = random.Random(seed)
    for argument in indexed.arguments:
        low = argument.low
        below = [] if low is None else [low - 1, -1000, LEAST] if low <= 0 else [low - 1]
        for value in (*below, argument.high + 1, argument.high + draw.randrange(2, 1000), MOST):
            given = copied(indexed.given)
            tensor = given[argument.name]
            tensor.view(-1)[draw.randrange(tensor.numel())] = value
            yield Wrong(indexed.function, given, argument.name, value)


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {
        n: each.clone() if isinstance(each, torch.Tensor) else each for n, each in given.items()
    }
