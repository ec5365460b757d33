"""Whether a saved state is one that an optimizer here can go on from, asked before it is loaded.

A state dict says neither which optimizer wrote it nor what its entries mean. Its keys tell:
``exp_avg`` and ``exp_avg_sq`` are Adam's averages whoever kept them, ``exp_avg`` alone is Lion's.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.sharded import is_sharded, placement_text, same_placement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MASTER = "master_param"  # an fp32 copy of a 16-bit parameter, which a fused optimizer may keep
_SHARED = "torch.distributed.checkpoint.state_dict"


def check_form(owner: str, loaded: Mapping[str, Any]) -> None:
    """Raises ArgumentError for what is not an optimizer's state dict."""
    if not {"state", "param_groups"} <= set(loaded):
        some = ", ".join(map(repr, list(loaded)[:4])) or "nothing"
        raise ArgumentError(
            f"{owner} cannot load this state dict: expected the keys 'state' and 'param_groups', "
            f"found {some}",
            why="it is not an optimizer's; is it a model's?" if loaded else "it is empty",
            hint="optimizer.load_state_dict(checkpoint['optimizer'])",
        )


def check_saved_group(
    owner: str, defaults: Mapping[str, Any], saved: Mapping[str, Any], where: str
) -> None:
    """Raises ArgumentError for a group of an optimizer of another kind, as far as its keys tell."""
    missing = [name for name in ("lr", "betas") if name in defaults and name not in saved]
    if missing:
        found = ", ".join(name for name in saved if name != "params")
        raise ArgumentError(
            f"{where}there is no {' and no '.join(missing)}, but {found or 'nothing else'}",
            why=f"it is not a group of an optimizer whose states {owner} can take",
        )


def check_saved_state(
    owner: str,
    saved: Mapping[str, Any],
    where: str,
    param: Tensor,
    names: Sequence[str],
    made: Any,
) -> None:
    """Raises ArgumentError, naming the entry, for a state that is not of this kind.

    ``names`` are the entries that must be there, tensors of the parameter's size and placement; a
    master may be. Any other tensor of that size is a state of some other rule, unless it is all
    zeros: DeepSpeed's CPULion keeps one that it never uses. ``made`` is the count of steps, None
    where there is none to be had.
    """
    why = f"it is not the state of an optimizer whose states {owner} can take"
    for name in names:
        if name not in saved:
            found = ", ".join(map(str, saved))
            raise ArgumentError(f"{where}there is no {name}, but {found or 'nothing'}", why=why)
    for name in (*names, MASTER):
        if name in saved:
            _check_tensor(saved[name], f"{where}{name}", param)
    for name in sorted(set(saved) - set(own_entries(saved, param, names))):
        if bool(saved[name].any()):
            raise ArgumentError(
                f"{where}unexpected {name}, a state of another rule; "
                f"expected {', '.join((*names, 'step'))}",
                why=why,
            )
    if made is None:
        raise ArgumentError(f"{where}there is no step, but {', '.join(map(str, saved))}", why=why)
    count = float(made) if not isinstance(made, Tensor) or made.numel() == 1 else math.nan
    if not (count >= 0 and count == math.floor(count) < math.inf):
        raise ArgumentError(f"{where}step is {made}, expected a whole number of at least 0")


def own_entries(saved: Mapping[str, Any], param: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """A state less those tensors of the parameter's size that are of some other rule."""
    return {
        name: value
        for name, value in saved.items()
        if name in (*names, MASTER, "step")
        or not (isinstance(value, Tensor) and value.numel() == param.numel() > 1)
    }


def _check_tensor(value: Any, where: str, param: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{where} is {value!r}, expected a tensor")
    if not same_placement(value, param):
        get = f"{_SHARED}.get_optimizer_state_dict(model, optimizer, options=full)"
        put = f"{_SHARED}.set_optimizer_state_dict(model, optimizer, state_dict, options=full)"
        raise ArgumentError(
            f"{where} is {placement_text(value)}, its parameter is {placement_text(param)}",
            hint=f"{put if is_sharded(param) else get}, "
            "where full is StateDictOptions(full_state_dict=True)",
        )
    if value.numel() != param.numel():
        raise ArgumentError(
            f"{where} has shape {list(value.shape)}, its parameter has {list(param.shape)}",
            why="the state dict was saved with other parameters, or in another order",
        )
