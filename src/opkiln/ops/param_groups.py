"""What every optimizer here asks of its parameter groups, with errors that name the place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch

from opkiln.errors import ArgumentError, ArgumentTypeError, UsageError
from opkiln.ops.saved_states import check_form, check_saved_group
from opkiln.ops.sharded import has_shards, refuse_partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_number(name: str, value: Any) -> float:
    """The number that an argument is, or a tensor of one. Raises UsageError for anything else."""
    if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value)
    raise ArgumentTypeError(f"{name} is {value!r}, expected a number")


def check_numbers(group: dict[str, Any], *names: str, where: str = "") -> None:
    """Raises UsageError for one that is not a number, negative or not finite."""
    for name in names:
        value = as_number(where + name, group[name])
        if not 0 <= value < math.inf:  # NaN is not
            raise ArgumentError(f"{where}{name} is {value}, expected a finite number of at least 0")


def check_betas(group: dict[str, Any], where: str = "") -> None:
    """Raises UsageError for what is not two numbers, and for a beta outside [0, 1)."""
    betas = group["betas"]
    if isinstance(betas, str) or not isinstance(betas, Sequence):
        raise ArgumentTypeError(f"{where}betas is {betas!r}, expected two numbers")
    if len(betas) != 2:
        raise ArgumentError(f"{where}betas is {betas!r}, expected two numbers")
    for i, beta in enumerate(betas):
        if not 0 <= as_number(f"{where}betas[{i}]", beta) < 1:
            raise ArgumentError(
                f"{where}betas[{i}] is {float(beta)}, expected at least 0 and less than 1"
            )


def check_hyperparameters(owner: str, group: dict[str, Any], where: str = "") -> None:
    """Those of Adam. Raises UsageError for a value that has no meaning."""
    if not isinstance(group["bias_correction"], bool):
        raise ArgumentTypeError(
            f"{where}bias_correction is {group['bias_correction']!r}, expected True or False",
            why="it is the third positional argument, as in DeepSpeed's",
            hint=f"{owner}(params, lr, betas=(0.9, 0.999))",
        )
    check_numbers(group, "lr", "eps", "weight_decay", where=where)
    check_betas(group, where)
    if group["amsgrad"]:
        raise UsageError(
            f"{where}amsgrad is not supported by {owner}",
            hint="torch.optim.AdamW(params, amsgrad=True)",
        )


def check_dtypes(index: int, group: dict[str, Any]) -> None:
    """Raises UsageError for a parameter of a type that the ops do not know."""
    for i, param in enumerate(group["params"]):
        if param.dtype not in DTYPES:
            raise ArgumentTypeError(
                f"{place(index, group, i)} has dtype {param.dtype}, "
                "expected float32, bfloat16 or float16"
            )


def refuse_partials(index: int, group: dict[str, Any]) -> None:
    """Raises UsageError for a DTensor of which no rank has values."""
    if has_shards(group["params"]):
        for i, param in enumerate(group["params"]):
            refuse_partial(param, place(index, group, i))


def sparse_gradient(owner: str, index: int, group: dict[str, Any]) -> UsageError:
    """The error for a group in which there is a sparse gradient."""
    name, layout = next(
        (place(index, group, i), param.grad.layout)
        for i, param in enumerate(group["params"])
        if param.grad is not None and param.grad.layout is not torch.strided
    )
    return UsageError(
        f"the gradient of {name} is sparse ({layout}); {owner} takes dense gradients only",
        hint="torch.optim.SparseAdam(params)",
    )


def place(index: int, group: dict[str, Any], i: int) -> str:
    """What to call a parameter in a message: by its name, too, where the group has names."""
    names = group.get("param_names")
    position = f"param_groups[{index}]['params'][{i}]"
    return f"{names[i]} ({position})" if names else position


def name_in(index: int, group: dict[str, Any]) -> Callable[[torch.Tensor], str]:
    """What to call a parameter of this group in a message, asked when there is one."""

    def name(param: torch.Tensor) -> str:
        found = next(i for i, each in enumerate(group["params"]) if each is param)
        return place(index, group, found)

    return name


@contextmanager
def taking_over(
    owner: str,
    optimizer: torch.optim.Optimizer,
    take_over: Callable[[dict[str, Any]], None],
    check: Callable[[dict[str, Any], str], None],
    check_state: Callable[[torch.Tensor, dict[str, Any], dict[str, Any], str], None],
) -> Iterator[None]:
    """Around torch's ``load_state_dict``: checks what is loaded before, and calls ``take_over``
    with it after torch has cast the states to the parameters' own types.

    ``check(group, where)`` checks the hyperparameters of a group.
    ``check_state(param, state, group, where)`` checks a parameter's state that is there, of a group
    that is loaded.
    Raises UsageError, before anything is changed.
    """
    seen: dict[str, Any] = {}

    # Last of the hooks before and first of those after: it sees what the user's hooks made of the
    # state dict, and they see the states as they will be.
    def before(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
        check_form(owner, loaded)
        # Where there are other numbers of groups or parameters, torch says so next.
        for index, (group, ours) in enumerate(
            zip(loaded["param_groups"], optimizer.param_groups, strict=False)
        ):
            where = f"param_groups[{index}]: "
            check_saved_group(owner, optimizer.defaults, group, where)
            check({**optimizer.defaults, **group}, where)
            for key, param in zip(group["params"], ours["params"], strict=False):
                if saved := loaded["state"].get(key):
                    check_state(param, saved, group, f"state[{key!r}]: ")
        seen.update(loaded)

    def after(_: torch.optim.Optimizer) -> None:
        take_over(seen)

    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
