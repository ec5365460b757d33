"""Checks of every optimizer: its parameter groups, and state dicts before they are loaded.

Errors name the argument, the parameter or the entry. A state dict does not say which optimizer
wrote it or what its entries mean, but its keys show it: ``exp_avg`` and ``exp_avg_sq`` are Adam's
averages, ``exp_avg`` alone is Lion's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from opkiln.errors import ArgumentError, ArgumentTypeError
from opkiln.ops.optimizing.sharded import is_sharded, placement_text, same_placement

MASTER = "master_param"  # an fp32 copy of a 16-bit parameter, which a fused optimizer may keep
_SHARED = "torch.distributed.checkpoint.state_dict"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_number(name: str, value: Any) -> float:
    """The argument, a number or a tensor of one number, as a float. Else raises UsageError."""
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    raise ArgumentTypeError(f"{name} is {value!r}, expected a number")


def check_numbers(group: dict[str, Any], *names: str, where: str = "") -> None:
    """Raises UsageError for a hyperparameter that is not a finite number of at least 0."""
    for name in names:
        value = group[name]
        if type(value) is not float:  # at each step, so the usual case is quick
            value = as_number(where + name, value)
        if not 0 <= value < math.inf:  # NaN is not
            raise ArgumentError(f"{where}{name} is {value}, expected a finite number of at least 0")


def check_betas(group: dict[str, Any], where: str = "") -> None:
    """Raises UsageError unless ``betas`` is two numbers of at least 0 and less than 1."""
    betas = group["betas"]
    if type(betas) is not tuple and (isinstance(betas, str) or not isinstance(betas, Sequence)):
        raise ArgumentTypeError(f"{where}betas is {betas!r}, expected two numbers")
    if len(betas) != 2:
        raise ArgumentError(f"{where}betas is {betas!r}, expected two numbers")
    for i, beta in enumerate(betas):
        value = beta if type(beta) is float else as_number(f"{where}betas[{i}]", beta)
        if not 0 <= value < 1:
            raise ArgumentError(
                f"{where}betas[{i}] is {float(beta)}, expected at least 0 and less than 1"
            )


def param_position(index: int, group: dict[str, Any], i: int) -> str:
    """A parameter's position for a message, with its name if the group has names."""
    names = group.get("param_names")
    position = f"param_groups[{index}]['params'][{i}]"
    return f"{names[i]} ({position})" if names else position


def name_param(index: int, group: dict[str, Any], param: Tensor) -> str:
    """The ``param_position`` of a parameter of this group. Slow: call it for errors only."""
    found = next(i for i, each in enumerate(group["params"]) if each is param)
    return param_position(index, group, found)


# State dicts


def check_form(owner: str, loaded: Mapping[str, Any]) -> None:
    """Raises ArgumentError if this is not an optimizer's state dict."""
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
    """Raises ArgumentError if the keys show that another kind of optimizer wrote the group."""
    missing = [name for name in ("lr", "betas") if name in defaults and name not in saved]
    if missing:
        found = ", ".join(name for name in saved if name != "params")
        raise ArgumentError(
            f"{where}missing {' and '.join(missing)}; found {found or 'nothing else'}",
            why=f"the group is not from an optimizer whose states {owner} can take",
        )


def check_saved_state(
    owner: str,
    saved: Mapping[str, Any],
    where: str,
    param: Tensor,
    names: Sequence[str],
    made: Any,
) -> None:
    """Raises ArgumentError, naming the entry, for a state of another kind of optimizer.

    ``names`` are the required entries, tensors of the parameter's size and placement; there may be
    a master. Any other tensor of that size belongs to another rule, unless it is all zeros:
    DeepSpeed's CPULion keeps one that it never uses. ``made`` is the count of steps, or None.
    """
    why = f"the state is not from an optimizer whose states {owner} can take"
    for name in names:
        if name not in saved:
            found = ", ".join(map(str, saved))
            raise ArgumentError(f"{where}missing {name}; found {found or 'nothing'}", why=why)
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
        raise ArgumentError(f"{where}missing step; found {', '.join(map(str, saved))}", why=why)
    count = float(made) if not isinstance(made, Tensor) or made.numel() == 1 else math.nan
    if not (count >= 0 and count == math.floor(count) < math.inf):
        raise ArgumentError(f"{where}step is {made}, expected a whole number of at least 0")


def own_entries(saved: Mapping[str, Any], param: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """A state without the tensors of the parameter's size that belong to another rule."""
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
