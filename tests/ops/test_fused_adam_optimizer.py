"""FusedAdam: steps as torch's Adam and AdamW, gradient scaling, masters, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from adam_models import (
    BF16,
    F16,
    F32,
    SHAPES,
    assert_same,
    give_gradients,
    parameters,
    stepped,
    twins,
)  # fmt: skip
from sample.references import references
from torch import Tensor

import opkiln
from opkiln.errors import ToolchainError
from opkiln.optim import FusedAdam


@pytest.fixture(params=["native", "reference"], autouse=True)
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What FusedAdam runs on: the native op, then the reference."""
    if request.param == "native":
        try:
            ops = opkiln.get_builder("fused_adam").jit_load(verbose=False)
        except ToolchainError as error:
            pytest.skip(f"no native fused_adam here: {error.what}")
    else:
        ops = references("fused_adam")
    monkeypatch.setattr(FusedAdam, "_ops", {"cpu": ops})
    return str(request.param)


def counts(optimizer: FusedAdam) -> list[int]:
    return [int(state["step"]) for state in optimizer.state.values()]


@pytest.mark.parametrize(
    ("adam_w_mode", "theirs", "maximize"), [(True, "AdamW", False), (False, "Adam", True)]
)
def test_a_hundred_steps_go_where_torchs_go(adam_w_mode: bool, theirs: str, maximize: bool) -> None:
    mine, other = twins(*SHAPES)
    options: dict[str, Any] = {
        "lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05, "maximize": maximize
    }  # fmt: skip
    ours = FusedAdam(mine, adam_w_mode=adam_w_mode, **options)
    torchs = getattr(torch.optim, theirs)(other, **options)
    for step in range(100):
        give_gradients(mine, other, seed=step)
        ours.step()
        torchs.step()
    assert_same(mine, other)
    assert len({id(state["step"]) for state in ours.state.values()}) == 1, "they share a count"


def test_groups_schedulers_and_missing_gradients_work_as_in_torch() -> None:
    mine, other = twins((5,), (6,), (7,), (8,))
    optimizers = []
    for params, kind in ((mine, FusedAdam), (other, torch.optim.AdamW)):
        groups = [
            {"params": params[:3], "lr": 1e-2},
            {"params": params[3:], "lr": 1e-3, "weight_decay": 0.3, "betas": (0.5, 0.6)},
        ]
        optimizers.append(kind(groups, weight_decay=0.1))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    for step in range(12):
        give_gradients(mine, other, seed=step)
        if step % 3 == 0:  # from now on the parameters of a group are at different steps
            mine[1].grad = other[1].grad = None
        if step < 4:
            mine[2].grad = other[2].grad = None
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert_same(mine, other)
    expected = [[12, 8, 8, 12]] * 2
    for optimizer, params in zip(optimizers, (mine, other), strict=True):
        assert [int(optimizer.state[param]["step"]) for param in params] == expected.pop()


def test_a_learning_rate_in_a_tensor_is_read_at_every_step() -> None:
    mine, other = twins((9,))
    rate = torch.tensor(1e-2)
    ours, theirs = FusedAdam(mine, lr=rate), FusedAdam(other, lr=1e-2)
    for step, value in enumerate((1e-2, 3e-3)):
        rate.fill_(value)
        theirs.param_groups[0]["lr"] = float(rate)
        give_gradients(mine, other, seed=step)
        ours.step()
        theirs.step()
    assert torch.equal(mine[0], other[0])


def test_a_closure_is_evaluated_with_gradients() -> None:
    (param,) = parameters((4,))
    optimizer = FusedAdam([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_zero_grad_follows_the_choice_of_keeping_gradients() -> None:
    params = parameters((4,))
    for optimizer, kept in (
        (FusedAdam(params), False),
        (FusedAdam(params, set_grad_none=False), True),
    ):
        give_gradients(params)
        optimizer.zero_grad()
        assert (params[0].grad is not None) is kept
        optimizer.zero_grad(set_to_none=True)
        assert params[0].grad is None


# Gradient scaling


def test_a_grad_scaler_scales_skips_and_goes_on() -> None:
    mine, other = twins((8,), (3,))
    ours, plain = FusedAdam(mine, lr=1e-2), FusedAdam(other, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    data = torch.Generator().manual_seed(3)
    for step in range(6):
        factors = [torch.randn(p.shape, generator=data) for p in mine]
        for optimizer, params in ((ours, mine), (plain, other)):
            optimizer.zero_grad()
            loss = sum(((p * f).square().sum() for p, f in zip(params, factors, strict=True)))
            (scaler.scale(loss) if optimizer is ours else loss).backward()
        if step == 2:
            mine[0].grad[1] = float("inf")
        scaler.step(ours)
        scaler.update()
        if step != 2:
            plain.step()
        assert scaler.get_scale() == (1024.0 if step < 2 else 512.0)
    assert_same(mine, other)
    assert counts(ours) == [5, 5]
    assert not hasattr(ours, "found_inf")


def test_gradients_that_were_unscaled_and_clipped_are_not_scaled_again() -> None:
    mine, other = twins((8,))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    ours, plain = FusedAdam(mine), FusedAdam(other)
    for optimizer, params in ((ours, mine), (plain, other)):
        loss = params[0].square().sum()
        (scaler.scale(loss) if optimizer is ours else loss).backward()
    scaler.unscale_(ours)
    for params in (mine, other):
        torch.nn.utils.clip_grad_norm_(params, 0.1)
    scaler.step(ours)
    plain.step()
    assert_same(mine, other)


# Masters


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_masters_are_stepped_in_place_of_narrow_parameters(dtype: torch.dtype) -> None:
    narrow, wide = [*parameters((33,), dtype=dtype), *parameters((7,))], parameters((33,), (7,))
    for param, source in zip(wide, narrow, strict=True):
        param.data.copy_(source.detach())
    ours, theirs = FusedAdam(narrow, lr=1e-4, master_weights=True), FusedAdam(wide, lr=1e-4)
    for step in range(20):
        give_gradients(narrow, seed=step)
        for param, source in zip(wide, narrow, strict=True):
            param.grad = source.grad.float()
        ours.step()
        theirs.step()
    assert torch.equal(ours.state[narrow[0]]["master_param"], wide[0].detach())
    assert torch.equal(narrow[0], wide[0].to(dtype))
    assert torch.equal(narrow[1], wide[1])
    assert "master_param" not in ours.state[narrow[1]]


def test_states_of_narrow_parameters_are_fp32() -> None:
    params = parameters((33,), dtype=BF16)
    state = stepped(FusedAdam, params, 1).state[params[0]]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == F32


# Layouts


@pytest.mark.parametrize("masters", [False, True])
def test_channels_last_and_transposed_and_gappy_parameters_step_as_contiguous_ones(
    masters: bool,
) -> None:
    def make(odd: bool) -> list[Tensor]:
        base = parameters((2, 3, 4, 5), (6, 8), (6, 8), (5,), dtype=BF16 if masters else F32)
        given = [
            base[0].detach().to(memory_format=torch.channels_last) if odd else base[0].detach(),
            base[1].detach().t(),
            base[2].detach()[:, ::2],
            base[3].detach(),
        ]
        return [(t if odd else t.contiguous()).requires_grad_() for t in given]

    mine, other = make(odd=True), make(odd=False)
    assert not mine[2].is_contiguous()
    ours = FusedAdam(mine, lr=1e-2, master_weights=masters)
    theirs = FusedAdam(other, lr=1e-2, master_weights=masters)
    for step in range(3):
        give_gradients(mine, other, seed=step)  # contiguous, whatever the parameter is
        ours.step()
        theirs.step()
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(a, b)
    assert counts(ours) == [3, 3, 3, 3]


# What is refused


def test_a_state_of_another_type_is_refused_by_name(served_by: str) -> None:
    if served_by == "reference":
        pytest.skip("the reference takes states of any type")
    params = parameters((4,))
    optimizer = stepped(FusedAdam, params, 1)
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(4, dtype=torch.float64)
    give_gradients(params)
    with pytest.raises(RuntimeError, match=r"exp_avgs\[0\] has dtype float64"):
        optimizer.step()
    assert counts(optimizer) == [1]


# Compiling and copying


def test_a_compiled_step_of_a_duplicate_steps_its_own_parameters() -> None:
    (mine,) = parameters((8,))
    original = FusedAdam([mine])
    before = mine.detach().clone()
    duplicate = copy.deepcopy(original)
    (param,) = duplicate.param_groups[0]["params"]
    param.grad = torch.ones(8)
    torch.compile(duplicate.step, fullgraph=True, backend="aot_eager")()
    assert torch.equal(mine, before)
    assert not torch.equal(param, before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_duplicate_goes_on_where_the_original_does(duplicate: Any) -> None:
    params = parameters((5,), (6,), dtype=BF16)
    optimizer = stepped(FusedAdam, params, 3, master_weights=True)
    other = duplicate(optimizer)
    theirs = other.param_groups[0]["params"]
    give_gradients(params, theirs, seed=9)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))
    assert counts(optimizer) == counts(other) == [4, 4]
    assert other.defaults["master_weights"] is True
