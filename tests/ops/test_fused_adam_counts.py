"""FusedAdam's counts of steps, which parameters share: each must be what torch's would be."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from adam_models import assert_same, give_gradients, parameters, stepped, twins
from sample.references import references
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from opkiln.optim import FusedAdam

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

reference = references("fused_adam")


@pytest.fixture(autouse=True)
def _served_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedAdam, "_ops", {"cpu": reference})


def counts(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[int]:
    return [int(optimizer.state[param]["step"]) for param in params]


def regroup(optimizer: torch.optim.Optimizer, *members: list[Tensor]) -> None:
    """Give the groups these parameters, adding groups where there are more."""
    for group in optimizer.param_groups:
        group["params"] = []
    for i, params in enumerate(members):
        if i < len(optimizer.param_groups):
            optimizer.param_groups[i]["params"] = list(params)
        else:
            optimizer.add_param_group({"params": list(params)})


def moved_to_a_new_group(optimizer: torch.optim.Optimizer, params: list[Tensor], step: int) -> None:
    if step == 1:
        regroup(optimizer, params[:2], params[2:])


def moved_and_moved_back(optimizer: torch.optim.Optimizer, params: list[Tensor], step: int) -> None:
    if step in (1, 3):
        regroup(optimizer, *((params[:2], params[2:]) if step == 1 else (params, [])))


def out_of_its_group(optimizer: torch.optim.Optimizer, params: list[Tensor], step: int) -> None:
    regroup(optimizer, params[:2] if 1 <= step <= 3 else params)


def moved_without_a_gradient(
    optimizer: torch.optim.Optimizer, params: list[Tensor], step: int
) -> None:
    """The parameters that go on are in one group, those that shared with them in another."""
    if step == 1:
        regroup(optimizer, params[:2], params[2:])
    if 1 <= step <= 3:
        params[2].grad = params[3].grad = None


def scattered(optimizer: torch.optim.Optimizer, params: list[Tensor], step: int) -> None:
    """Counts of several groups meet in one, some of them shared with parameters elsewhere."""
    orders = ([0, 1, 2, 3], [0, 2], [1, 2, 3], [0, 3], [3, 1], [2, 0, 1, 3])
    order = [params[i] for i in orders[step]]
    regroup(optimizer, order[1:], order[:1])


@pytest.mark.parametrize(
    "change",
    [
        moved_to_a_new_group,
        moved_and_moved_back,
        out_of_its_group,
        moved_without_a_gradient,
        scattered,
    ],
)
@pytest.mark.parametrize("loaded", [False, True], ids=["stepped", "loaded"])
def test_steps_are_counted_as_torch_counts_them_when_groups_change(
    change: Callable[[torch.optim.Optimizer, list[Tensor], int], None], loaded: bool
) -> None:
    mine, other = twins((3,), (4,), (5,), (6,))
    ours, theirs = (
        kind(params, lr=1e-2, weight_decay=0.1)
        for kind, params in ((FusedAdam, mine), (torch.optim.AdamW, other))
    )
    for step in range(6):
        if loaded and step == 1:
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        give_gradients(mine, other, seed=step)
        for optimizer, params in ((ours, mine), (theirs, other)):
            change(optimizer, params, step)
            optimizer.step()
        assert counts(ours, mine) == counts(theirs, other), f"after step {step}"
    assert_same(mine, other)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_duplicate_shares_counts_among_its_own_parameters_only(duplicate: Any) -> None:
    params = parameters((3,), (4,))
    optimizer = stepped(FusedAdam, params, 2)
    other = duplicate(optimizer)
    theirs = other.param_groups[0]["params"]
    give_gradients(theirs)
    regroup(other, theirs[:1], theirs[1:])
    other.step()
    regroup(other, theirs[:1])
    other.step()
    assert counts(other, theirs) == [4, 3]
    assert counts(optimizer, params) == [2, 2]


def test_parameters_that_part_keep_few_counts() -> None:
    """One for each group: the parameters of a group still share theirs, made once."""
    params = parameters((3,), (4,), (5,), (6,))
    optimizer = stepped(FusedAdam, params, 1)
    whole = optimizer.state[params[0]]["step"]
    regroup(optimizer, params[:2], params[2:])
    seen = []
    for _ in range(2):
        give_gradients(params)
        optimizer.step()
        seen.append([id(optimizer.state[param]["step"]) for param in params])
    assert seen[0] == seen[1]
    assert seen[0][0] == seen[0][1] != seen[0][2] == seen[0][3]
    assert id(whole) in seen[0], "one of the groups goes on with the count that was there"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside_others"])
def test_a_parameter_named_twice_does_not_move_the_count_of_one_that_rests(others: bool) -> None:
    twice, rests, new = parameters((3,), (4,), (5,))
    optimizer = stepped(FusedAdam, [twice, rests], 1)
    give_gradients([twice, rests, new])
    regroup(optimizer, [twice, twice, *([new] if others else [])])
    optimizer.step()
    assert counts(optimizer, [twice, rests]) == [2, 1]


def test_what_users_keep_in_the_state_is_left_alone() -> None:
    params = parameters((3,))
    optimizer = FusedAdam(params)
    optimizer.state["note"] = 5
    give_gradients(params)
    optimizer.step()
    assert counts(optimizer, params) == [1]
    assert optimizer.state_dict()["state"]["note"] == 5


class LateCopies(TorchDispatchMode):
    """Copies that need not be waited for arrive later, as those from a GPU to host memory do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copied = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("non_blocking"):
            return torch.zeros_like(copied)
        return copied


def test_a_scalers_numbers_have_arrived_when_parameters_on_the_cpu_are_stepped() -> None:
    mine, other = twins((4,))
    ours, plain = FusedAdam(mine), FusedAdam(other)
    give_gradients(mine, other)
    mine[0].grad *= 8
    plain.step()
    # bf16, so that there is something to copy without a GPU.
    for found, made in ((1.0, 0), (0.0, 1)):
        ours.grad_scale = torch.tensor(8.0, dtype=torch.bfloat16)
        ours.found_inf = torch.tensor(found, dtype=torch.bfloat16)
        with LateCopies():
            ours.step()
        assert counts(ours, mine) == [made]
    assert_same(mine, other)
