"""Keys and values of a ragged batch, written to a paged cache.

T counts the tokens of the batch. ``k`` and ``v`` are [T, kv heads, head]; they may be views of one
tensor that a linear layer gave. The caches are [blocks, block size, kv heads, head]. All have one
dtype: fp32, fp16 or bf16. The elements of a head lie together.

``sequences``, int32 [T], is the row of ``block_table`` that a token belongs to, and ``positions``,
int32 [T], its place in that sequence, from 0 on. ``block_table``, int32 [batch, blocks of a
sequence], says which blocks hold a sequence, in order. A token whose sequence or position is
negative is padding, and not written. A token without a block is an error: on a GPU an assertion, as
with torch's own functions. No two tokens may have the same place.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_float, check_within
from opkiln.ops.ragged_device_ops.op import paged as kit
from opkiln.ops.rotating import cos_and_sin, rotate

_MOST = 512  # elements of a head that are rotated


@kit.op(mutates=("k_cache", "v_cache"))
def paged_kv_copy(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequences: Tensor,
    positions: Tensor,
) -> None:
    """Write ``k`` and ``v`` to the cache. Raises RuntimeError, naming the argument."""
    _check(k, v, k_cache, v_cache, block_table, sequences, positions)
    _write(k, v, k_cache, v_cache, block_table, sequences, positions)


@kit.op()
def listed_blocks(lists: Tensor, lengths: Tensor, block_size: int, width: int) -> Tensor:
    """A block table, int32 [batch, width], of lists that are known by their addresses alone.

    ``lists``, int64 [batch], has for each sequence the address of its blocks, int32, in the memory
    of this device. ``lengths``, int32 [batch], are the tokens of each: so many blocks are read, at
    most ``width``, and -1 stands behind them. Nobody can check an address: a wrong one ends the
    process, or the GPU's context. Raises RuntimeError, naming the argument.
    """
    check("lists", lists, torch.int64, dims=1)
    check("lengths", lengths, torch.int32, at=lists, of="lists", shape=[*lists.shape])
    if block_size < 1 or width < 0:
        raise RuntimeError(
            f"block_size is {block_size}, width is {width}, expected at least 1 and 0"
        )
    table = lengths.new_full((lists.shape[0], width), -1)
    for row, (address, tokens) in enumerate(zip(lists.tolist(), lengths.tolist(), strict=True)):
        count = min(-(-tokens // block_size), width)
        if count > 0:
            table[row, :count] = _memory(address, count, lists.device)
    return table


@listed_blocks.fake
def _table(_lists: Tensor, lengths: Tensor, _block_size: int, width: int) -> Tensor:
    return lengths.new_empty(lengths.shape[0], width)


def _memory(address: int, count: int, device: torch.device) -> Tensor:
    """A view of so many int32 at an address of the device."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_int32 * count).from_address(address), dtype=torch.int32)
    # The form that torch takes from other libraries.
    there = {"data": (address, False), "shape": (count,), "typestr": "<i4", "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=there), device=device)


@kit.op(mutates=("k_cache", "v_cache"))
def paged_kv_rotary(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequences: Tensor,
    positions: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dim: int = 0,
    theta: float = 10000.0,
) -> Tensor:
    """Rotate ``q`` and ``k``, write ``k`` and ``v`` to the cache, and return the rotated ``q``.

    ``q`` is [T, heads, head], and the result has this shape. The first ``dim`` elements of each
    head (all of them, if it is 0; at most 512) are rotated by ``positions``: of ``n`` pairs, pair
    ``i`` has the elements ``i`` and ``n + i``, and turns by ``position * theta ** (-i / n)``.
    ``cos`` and ``sin``, both [positions, n], fp32, fp16 or bf16, replace ``theta``: a position is
    a row of them. A position without a row is an error, as a token without a block. Padding
    is rotated, too, and a negative position counts as 0. 16-bit elements are rotated in fp32 and
    rounded once. Raises RuntimeError, naming the argument.
    """
    _check(k, v, k_cache, v_cache, block_table, sequences, positions)
    check("q", q, like=k, of="k", dims=3)
    _check_some("q", q)
    check("q", q, shape=[k.shape[0], q.shape[1], k.shape[2]])
    turned, most = dim or q.shape[2], min(q.shape[2], _MOST)
    if not 0 < turned <= most or turned % 2:
        raise RuntimeError(f"dim is {turned}, expected an even number from 2 to {most}")
    c, s = cos_and_sin(positions.clamp(min=0), turned // 2, cos, sin, theta, q.dtype)
    _write(rotate(k, c, s), v, k_cache, v_cache, block_table, sequences, positions)
    return rotate(q, c, s).contiguous()


@paged_kv_rotary.fake
def _queries(q: Tensor, *_: object, **__: object) -> Tensor:
    return q.new_empty(q.shape)


def _write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *tables: Tensor) -> None:
    block_table, sequences, positions = tables
    size = k_cache.shape[1]
    real = (sequences >= 0) & (positions >= 0)
    rows, places = sequences[real].long(), positions[real].long()
    check_within("sequences", rows, 0, block_table.shape[0] - 1)
    check_within("positions", places, 0, block_table.shape[1] * size - 1)
    blocks = block_table[rows, places // size].long()
    check_within("block_table", blocks, 0, k_cache.shape[0] - 1)
    k_cache[blocks, places % size] = k[real]
    v_cache[blocks, places % size] = v[real]


def _check(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *tables: Tensor) -> None:
    block_table, sequences, positions = tables
    check_float("k", k, 3)
    _check_some("k", k)
    tokens, heads, head = k.shape
    check("v", v, like=k, of="k", shape=[tokens, heads, head])
    check("k_cache", k_cache, dims=4)
    _check_some("k_cache", k_cache)
    blocks, size = k_cache.shape[:2]
    check("k_cache", k_cache, like=k, of="k", shape=[blocks, size, heads, head])
    check("v_cache", v_cache, like=k, of="k", shape=[blocks, size, heads, head])
    check("block_table", block_table, torch.int32, at=k, of="k", dims=2)
    check("sequences", sequences, torch.int32, at=k, of="k", shape=[tokens])
    check("positions", positions, torch.int32, at=k, of="k", shape=[tokens])


def _check_some(name: str, x: Tensor) -> None:
    """Only the first dimension may have the size 0."""
    for dim, size in enumerate(x.shape):
        if dim > 0 and size == 0:
            raise RuntimeError(
                f"{name} has shape {list(x.shape)}, expected at least 1 in dimension {dim}"
            )
