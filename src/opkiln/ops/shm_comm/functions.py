"""The functions of ``shm_comm``. Every rank of a group calls the same ones in the same order.

``group`` is the number of a ``ShmGroup`` (``group.number``). ``op`` is one of "sum", "mean",
"product", "max" and "min". Elements are combined in the order of the ranks: those of fp32, bf16 and
fp16 in fp32, with one rounding at the end. So all ranks have the same bits, each time.

The references do the same by way of gloo. They serve other dtypes, and groups whose ranks have no
native library. RuntimeError is raised by all of them if a rank dies, leaves or does not come within
the group's timeout, and if the ranks call different things.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from opkiln.ops.checks import check, check_contiguous, check_numel, widen
from opkiln.ops.shm_comm.op import kit

if TYPE_CHECKING:
    from collections.abc import Callable

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class Peers(Protocol):
    """What the references and the shapes need of a ``ShmGroup``."""

    rank: int
    size: int

    def gather_by_gloo(self, x: Tensor) -> list[Tensor]: ...


# By the group's number. Numbers of groups without shared memory are below 0.
GROUPS: WeakValueDictionary[int, Peers] = WeakValueDictionary()


@kit.op()
def shm_join(host: Tensor, fd: int, rank: int, size: int, slot: int, milliseconds: int) -> int:
    """Map the memory of a group and take a rank in it; the group's number. The descriptor is the
    library's from then on. ``host`` is any tensor on the CPU, which chooses the library. Raises
    RuntimeError."""
    del host, fd, rank, size, slot, milliseconds
    raise RuntimeError("shared memory needs the native library")


@kit.op()
def shm_leave(host: Tensor, group: int) -> None:
    """Give the memory of a group back, when the last call on it has returned."""


@kit.op()
def shm_all_reduce(x: Tensor, group: int, op: str = "sum") -> Tensor:
    """The elements of all ranks, combined. Differentiable for "sum" and "mean"."""
    parts = _peers(group).gather_by_gloo(x.contiguous())
    return _combine([part.view(x.shape) for part in parts], op)


@kit.op(mutates="x")
def shm_all_reduce_(x: Tensor, group: int, op: str = "sum") -> None:
    """``shm_all_reduce`` in place."""
    parts = _peers(group).gather_by_gloo(x.contiguous())
    x.copy_(_combine([part.view(x.shape) for part in parts], op))


@kit.op()
def shm_reduce_scatter(x: Tensor, group: int, op: str = "sum") -> Tensor:
    """This rank's part of ``shm_all_reduce``: of N ranks, one Nth of the rows. Differentiable for
    "sum" and "mean"."""
    peers = _peers(group)
    _check_rows(x, peers.size)
    rows = x.shape[0] // peers.size
    begin = peers.rank * rows
    parts = peers.gather_by_gloo(x.contiguous())
    return _combine([part.view(x.shape)[begin : begin + rows] for part in parts], op)


@kit.op(mutates="out")
def shm_reduce_scatter_into(out: Tensor, x: Tensor, group: int, op: str = "sum") -> None:
    """``shm_reduce_scatter`` into ``out``. Both are contiguous, of any shapes: ``x`` has the
    elements for rank 0 first, as many as ``out`` has."""
    peers = _peers(group)
    _check_pair(out, x)
    check_numel("x", x, out.numel() * peers.size)
    parts = [part.view(peers.size, out.numel())[peers.rank] for part in peers.gather_by_gloo(x)]
    out.copy_(_combine(parts, op).view(out.shape))


@kit.op()
def shm_all_gather(x: Tensor, group: int) -> Tensor:
    """The rows of all ranks, of any dtype, those of rank 0 first. Differentiable."""
    if x.dim() == 0:
        raise RuntimeError("x has no dimensions, expected at least one")
    return torch.cat([part.view(x.shape) for part in _peers(group).gather_by_gloo(x.contiguous())])


@kit.op(mutates="out")
def shm_all_gather_into(out: Tensor, x: Tensor, group: int) -> None:
    """``shm_all_gather`` into ``out``. Both are contiguous, of any shapes."""
    peers = _peers(group)
    _check_pair(out, x)
    check_numel("out", out, x.numel() * peers.size)
    out.copy_(torch.stack([part.view(-1) for part in peers.gather_by_gloo(x)]).view(out.shape))


# Shapes: the references talk to other ranks.


@shm_join.fake
def _join_shape(*_: object) -> int:
    raise RuntimeError("a group cannot be made in a function that is traced")


@shm_all_reduce.fake
def _all_reduce_shape(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@shm_reduce_scatter.fake
def _reduce_scatter_shape(x: Tensor, group: int, *_: object) -> Tensor:
    size = _peers(group).size
    _check_rows(x, size)
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


@shm_all_gather.fake
def _all_gather_shape(x: Tensor, group: int) -> Tensor:
    return x.new_empty((x.shape[0] * _peers(group).size, *x.shape[1:]))


# Gradients: a result of all ranks' elements, differentiated on all ranks.


@shm_all_reduce.backward
def _all_reduce_gradient(
    grad: Tensor, _x: Tensor, group: int, op: str
) -> tuple[Tensor | None, ...]:
    _check_linear("all_reduce", op)
    return shm_all_reduce(grad, group, op), None, None


@shm_reduce_scatter.backward
def _reduce_scatter_gradient(
    grad: Tensor, _x: Tensor, group: int, op: str
) -> tuple[Tensor | None, ...]:
    _check_linear("reduce_scatter", op)
    every = shm_all_gather(grad, group)
    return every / _peers(group).size if op == "mean" else every, None, None


@shm_all_gather.backward
def _all_gather_gradient(grad: Tensor, _x: Tensor, group: int) -> tuple[Tensor | None, ...]:
    return shm_reduce_scatter(grad, group, "sum"), None


def _check_linear(name: str, op: str) -> None:
    if op not in ("sum", "mean"):
        raise RuntimeError(f'{name} with op {op} has no gradient; "sum" and "mean" have')


# What the references are made of


def _peers(group: int) -> Peers:
    found = GROUPS.get(group)
    if found is None:
        raise RuntimeError("the group is closed")
    return found


def _combine(parts: list[Tensor], op: str) -> Tensor:
    if op not in OPS:
        raise RuntimeError(f"op is {op}, expected sum, mean, product, max or min")
    result = reduce(OPS[op], map(widen, parts))
    if op == "mean":
        result = result / len(parts)
    return result.to(parts[0].dtype, copy=True)


def _check_rows(x: Tensor, size: int) -> None:
    if x.dim() == 0 or x.shape[0] % size:
        raise RuntimeError(
            f"x has shape {list(x.shape)}, expected a multiple of {size} rows, which is the "
            "number of ranks"
        )


def _check_pair(out: Tensor, x: Tensor) -> None:
    check_contiguous("out", out)
    check_contiguous("x", x)
    check("out", out, like=x)
