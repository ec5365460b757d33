"""CPUAdam: steps as torch's Adam and AdamW, and what is its own of copies, rollback and refusals.

``test_cpu_optimizers.py`` has what it shares with the others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adam_models import (
    SHAPES,
    assert_same,
    give_gradients,
    parameters,
    stepped,
    twins,
)  # fmt: skip

from opkiln.errors import UsageError
from opkiln.optim import CPUAdam

pytestmark = pytest.mark.usefixtures("served_by")


@pytest.mark.parametrize(
    ("adamw_mode", "theirs", "maximize"), [(True, "AdamW", False), (False, "Adam", True)]
)
def test_a_hundred_steps_go_where_torchs_go(adamw_mode: bool, theirs: str, maximize: bool) -> None:
    mine, other = twins(*SHAPES)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}
    ours = CPUAdam(mine, adamw_mode=adamw_mode, maximize=maximize, **options)
    torchs = getattr(torch.optim, theirs)(other, maximize=maximize, **options)
    for step in range(100):
        give_gradients(mine, other, seed=step)
        ours.step()
        torchs.step()
    assert_same(mine, other)


def test_groups_schedulers_and_missing_gradients_work_as_in_torch() -> None:
    mine, other = twins((5,), (6,), (7,))
    optimizers = []
    for params, kind in ((mine, CPUAdam), (other, torch.optim.AdamW)):
        groups = [
            {"params": params[:2], "lr": 1e-2},
            {"params": params[2:], "lr": 1e-3, "weight_decay": 0.3, "betas": (0.5, 0.6)},
        ]
        optimizers.append(kind(groups, weight_decay=0.1))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    for step in range(10):
        give_gradients(mine, other, seed=step)
        if step % 3 == 0:  # from now on the parameters of a group are at different steps
            mine[1].grad = other[1].grad = None
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert_same(mine, other)
    steps = [int(state["step"]) for state in optimizers[1].state.values()]
    assert [state["step"] for state in optimizers[0].state.values()] == steps == [10, 10, 6]


def test_a_closure_is_evaluated_with_gradients() -> None:
    (param,) = parameters((4,))
    optimizer = CPUAdam([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_gradients_are_divided_by_the_scale() -> None:
    mine, other = twins((9,))
    give_gradients(mine, other)
    mine[0].grad.mul_(1024)
    CPUAdam(mine).step(grad_scale=1024.0)
    CPUAdam(other).step()
    assert torch.equal(mine[0], other[0])


def test_a_changed_state_or_group_is_used_at_the_next_step() -> None:
    params = parameters((5,), (6,))
    optimizer = stepped(CPUAdam, params[:1], 2)
    optimizer.state[params[0]] = {
        "step": torch.tensor(9.0), "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)
    }  # fmt: skip
    optimizer.add_param_group({"params": params[1:], "lr": 0.0})
    params[0].data = torch.zeros(5)
    before = params[1].detach().clone()
    give_gradients(params)
    optimizer.step()
    assert [state["step"] for state in optimizer.state.values()] == [10, 1]
    assert optimizer.param_groups[0].keys() == optimizer.param_groups[1].keys()
    assert torch.equal(params[1], before), "its group's learning rate is 0"
    assert (params[0] < 0).all(), "it moved from 0 against the average that was put there"


# Copies and rollback


def test_a_copy_of_a_stranger_is_refused() -> None:
    params = parameters((5,))
    give_gradients(params)
    with pytest.raises(UsageError, match=r"unexpected keys in copies, of shapes \(3,\)"):
        CPUAdam(params).step(copies={torch.zeros(3): torch.zeros(3)})


def test_rollback_needs_a_step_and_its_gradients() -> None:
    params = parameters((5,))
    optimizer = CPUAdam(params)
    with pytest.raises(UsageError, match="no step to roll back"):
        optimizer.rollback()
    give_gradients(params)
    optimizer.step()
    after = params[0].detach().clone()
    grad, params[0].grad = params[0].grad, None
    with pytest.raises(UsageError, match="gradient of the last step is missing"):
        optimizer.rollback()
    assert torch.equal(params[0], after)
    params[0].grad = grad
    optimizer.rollback()
    with pytest.raises(UsageError, match="no step to roll back"):
        optimizer.rollback()


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1"),
        ({"betas": (0.9, float("nan"))}, r"betas\[1\] is nan"),
        ({"amsgrad": True}, "amsgrad is not supported"),
    ],
)
def test_its_own_hyperparameters_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CPUAdam(parameters((3,)), **options)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_meaningless_gradient_scale_is_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="grad_scale is"):
        CPUAdam(parameters((3,))).step(grad_scale=scale)
