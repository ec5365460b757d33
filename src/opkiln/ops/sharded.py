"""Parameters that are DTensors, as FSDP2 and tensor parallelism make them, and their local parts.

An op steps the part of a parameter that is on this rank. Its states are DTensors of the same
placements, as torch's own optimizers make them.
torch.distributed is not imported from here: while nobody else has, there is no DTensor.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from opkiln.errors import ArgumentError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def has_shards(tensors: list[Tensor]) -> bool:
    """Whether one of them is a DTensor."""
    kind = _dtensor()
    return kind is not None and any(issubclass(each, kind) for each in set(map(type, tensors)))


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def parts_of(tensors: list[Tensor]) -> list[Tensor]:
    """The list itself where there is no DTensor in it; otherwise with their parts on this rank."""
    return list(map(part_of, tensors)) if has_shards(tensors) else tensors


def part_of(tensor: Tensor) -> Tensor:
    """What of it is on this rank: of a DTensor the same object each time, as long as it stays.

    (Its ``to_local()`` makes a new view of a parameter at each call.)
    """
    if not is_sharded(tensor):
        return tensor
    part: Any = tensor._local_tensor  # type: ignore[attr-defined]
    # A collective that torch has begun and nobody has waited for.
    waited: Tensor = part.wait() if hasattr(part, "wait") else part
    return waited


def like(param: Tensor, part: Tensor) -> Tensor:
    """A tensor whose part on this rank is ``part``, placed as the parameter is."""
    kind = _dtensor()
    if kind is None or not isinstance(param, kind):
        return part
    whole: Tensor = kind.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape,
        stride=param.stride(),
    )  # fmt: skip
    return whole


def same_placement(tensor: Tensor, param: Tensor) -> bool:
    """Whether both are ordinary tensors, or DTensors of one mesh and the same placements."""
    if is_sharded(tensor) != is_sharded(param):
        return False
    return not is_sharded(param) or _placement(tensor) == _placement(param)


def placement_text(tensor: Tensor) -> str:
    """For messages."""
    if not is_sharded(tensor):
        return "an ordinary tensor"
    mesh, placements = _placement(tensor)
    shown = ", ".join(map(repr, placements))
    return f"a DTensor ({shown}) on a mesh of {' x '.join(map(str, mesh.shape))}"


def gradient_parts(
    params: list[Tensor], grads: list[Any], name_of: Callable[[Tensor], str]
) -> list[Any]:
    """The gradients' parts beside those of their parameters, None where there is no gradient.

    One that is placed otherwise (a sum that is still to be made, say) is redistributed, which is
    a collective. Raises ArgumentError, with the parameter's name, for one that cannot be.
    """
    return [
        _gradient_part(param, grad, name_of) if grad is not None and is_sharded(param) else grad
        for param, grad in zip(params, grads, strict=True)
    ]


def _gradient_part(param: Tensor, grad: Any, name_of: Callable[[Tensor], str]) -> Tensor:
    if not is_sharded(grad) or _placement(grad)[0] != _placement(param)[0]:
        raise ArgumentError(
            f"the gradient of {name_of(param)} is {placement_text(grad)}; "
            f"the parameter is {placement_text(param)}",
            hint="torch.distributed.tensor.distribute_tensor("
            "grad, param.device_mesh, param.placements)",
        )
    placed = (
        grad if same_placement(grad, param) else grad.redistribute(placements=_placement(param)[1])
    )
    return part_of(placed)


def refuse_partial(param: Tensor, name: str) -> None:
    """Raises ArgumentError for a DTensor that is a sum which is still to be made."""
    if is_sharded(param) and any(each.is_partial() for each in _placement(param)[1]):
        raise ArgumentError(
            f"{name} is {placement_text(param)}: no rank has its values, only terms of their sum",
            hint="param.redistribute(placements=[Replicate()])",
        )


def refuse_fsdp1(needed: str, param: Tensor, name: str) -> None:
    """Raises ArgumentError for a parameter that FullyShardedDataParallel has flattened: it may be
    a part of several tensors, and nothing says which other ranks have the rest."""
    if getattr(param, "_fsdp_flattened", False):
        raise ArgumentError(
            f"{name} is part of a flat parameter of FullyShardedDataParallel",
            why=f"{needed} norms of whole tensors, of which each rank has a part",
            hint="use torch.distributed.fsdp.fully_shard (FSDP2), which says what is where",
        )


def sum_over_shards(params: list[Tensor], numbers: Tensor) -> None:
    """Add up a row of numbers per parameter, of its part here, over the ranks that have the others.

    Ranks with the same part of it (replicas) count once. All rows of a mesh's dimension go in one
    collective; those are in the order of the parameters, which all ranks share.
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
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def _placement(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    return tensor.device_mesh, tuple(tensor.placements)
