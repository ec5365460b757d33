"""Parameters that are DTensors, as FSDP2 and tensor parallelism make them, and their local parts.

An op steps the part of a parameter that is on this rank. Its states are DTensors of the same
placements, as torch's own optimizers make them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from opkiln.errors import ArgumentError


def has_shards(tensors: list[Tensor]) -> bool:
    """Whether one of them is a DTensor."""
    kind = _dtensor()
    return kind is not None and any(issubclass(each, kind) for each in set(map(type, tensors)))


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def parts_of(tensors: list[Tensor]) -> list[Tensor]:
    """The list, with each DTensor replaced by its part on this rank; the same list without any."""
    return list(map(part_of, tensors)) if has_shards(tensors) else tensors


def part_of(tensor: Tensor) -> Tensor:
    """The tensor, or a DTensor's part on this rank: the same object each time.

    (``to_local()`` makes a new view of a parameter at each call.)
    """
    if not is_sharded(tensor):
        return tensor
    part: Any = tensor._local_tensor  # type: ignore[attr-defined]
    # The part may be the result of a collective that is still running.
    waited: Tensor = part.wait() if hasattr(part, "wait") else part
    return waited


def wrap_part(param: Tensor, part: Tensor) -> Tensor:
    """A tensor whose part on this rank is ``part``, with the parameter's placement."""
    if not is_sharded(param):
        return part
    whole: Tensor = _dtensor().from_local(
        part, *_placement(param), run_check=False, shape=param.shape, stride=param.stride()
    )
    return whole


def same_placement(tensor: Tensor, param: Tensor) -> bool:
    """Whether both are ordinary tensors, or DTensors of one mesh and the same placements."""
    return bool(_placement(tensor) == _placement(param))


def placement_text(tensor: Tensor) -> str:
    """A description of a tensor's placement, for messages."""
    if (placed := _placement(tensor)) is None:
        return "an ordinary tensor"
    mesh, placements = placed
    shown = ", ".join(map(repr, placements))
    return f"a DTensor ({shown}) on a mesh of {' x '.join(map(str, mesh.shape))}"


def gradient_parts(
    params: list[Tensor], grads: list[Any], name_of: Callable[[Tensor], str]
) -> list[Any]:
    """The parts of the gradients on this rank, None where there is no gradient.

    A gradient that is not placed like its parameter, such as a partial sum, is redistributed by a
    collective. Raises ArgumentError, with the parameter's name, if that is impossible.
    """
    parts = list(grads)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad is None or not is_sharded(param):
            continue
        mesh, placements = _placement(param)
        if not is_sharded(grad) or grad.device_mesh != mesh:
            raise ArgumentError(
                f"the gradient of {name_of(param)} is {placement_text(grad)}; "
                f"the parameter is {placement_text(param)}",
                hint="torch.distributed.tensor.distribute_tensor("
                "grad, param.device_mesh, param.placements)",
            )
        placed = same_placement(grad, param)
        parts[i] = part_of(grad if placed else grad.redistribute(placements=placements))
    return parts


def refuse_partial(param: Tensor, name: str) -> None:
    """Raises ArgumentError for a DTensor that is a partial sum."""
    if is_sharded(param) and any(each.is_partial() for each in _placement(param)[1]):
        raise ArgumentError(
            f"{name} is {placement_text(param)}: ranks have partial sums, and none has the values",
            hint="param.redistribute(placements=[Replicate()])",
        )


def refuse_fsdp1(needed: str, param: Tensor, name: str) -> None:
    """Raises ArgumentError for a parameter that FullyShardedDataParallel has flattened. It may have
    parts of several tensors, and nothing says which ranks have the rest."""
    if getattr(param, "_fsdp_flattened", False):
        raise ArgumentError(
            f"{name} is part of a flat parameter of FullyShardedDataParallel",
            why=f"{needed} norms of whole tensors, but each rank has only a part",
            hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
        )


def sum_over_shards(params: list[Tensor], numbers: Tensor) -> None:
    """Add up each parameter's row of numbers over the ranks that have its other parts.

    Ranks with the same part (replicas) count once. There is one collective per dimension of a mesh,
    in the order of the parameters, which is the same on all ranks.
    """
    rows: dict[tuple[Any, int], list[int]] = {}
    for i, param in enumerate(params):
        if is_sharded(param):
            mesh, placements = _placement(param)
            for dimension, placement in enumerate(placements):
                if not placement.is_replicate():
                    rows.setdefault((mesh, dimension), []).append(i)
    for (mesh, dimension), members in rows.items():
        from torch import distributed

        part = numbers[members]
        distributed.all_reduce(part, group=mesh.get_group(dimension))
        numbers[members] = part


def _dtensor() -> Any:
    """The class DTensor, or None if it was not imported. Then there is no DTensor in this process,
    and importing torch.distributed here would only take time."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def _placement(tensor: Any) -> Any:
    """The mesh and the placements of a DTensor; None for another tensor."""
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None
