"""CPUAdam's state dicts, to and from torch and DeepSpeed, and duplicates of an optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from adam_models import BF16, F32, SHAPES, assert_same, give_gradients, parameters, stepped, twins

from opkiln.errors import UsageError
from opkiln.optim import CPUAdam

pytestmark = pytest.mark.usefixtures("served_by")


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("theirs", [torch.optim.AdamW, torch.optim.Adam])
def test_training_moves_between_torch_and_here_through_a_checkpoint(theirs: Any) -> None:
    mine, other = twins(*SHAPES)
    ours = stepped(CPUAdam, mine, 5, adamw_mode=theirs is torch.optim.AdamW)
    torchs = stepped(theirs, other, 5)
    swapped_here = CPUAdam(other)
    swapped_here.load_state_dict(through_a_file(torchs.state_dict()))
    swapped_there = theirs(mine)
    swapped_there.load_state_dict(through_a_file(ours.state_dict()))
    for step in range(5, 10):
        give_gradients(mine, other, seed=step)
        swapped_here.step()
        swapped_there.step()
    assert_same(mine, other)
    assert swapped_here.param_groups[0]["decoupled_weight_decay"] is (theirs is torch.optim.AdamW)


def test_the_state_dict_looks_like_torchs() -> None:
    mine, other = twins((3, 4))
    ours, theirs = stepped(CPUAdam, mine, 2), stepped(torch.optim.AdamW, other, 2)
    for key, value in theirs.state_dict()["state"][0].items():
        got = ours.state_dict()["state"][0][key]
        assert (got.dtype, got.shape) == (value.dtype, value.shape), key
    assert ours.state_dict()["state"][0]["step"].item() == 2.0
    assert ours.state[mine[0]]["step"] == 2, "taking a state dict must not change the state"


def test_loading_keeps_fp32_states_of_narrow_parameters() -> None:
    params = parameters((100,), dtype=BF16)
    saved = stepped(CPUAdam, params, 3).state_dict()
    resumed = CPUAdam(parameters((100,), dtype=BF16))
    resumed.load_state_dict(saved)
    state = next(iter(resumed.state.values()))
    assert state["exp_avg"].dtype == F32
    assert torch.equal(state["exp_avg"], saved["state"][0]["exp_avg"])


def test_loading_follows_the_choice_of_narrow_states() -> None:
    saved = stepped(CPUAdam, parameters((100,), dtype=BF16), 3).state_dict()
    resumed = CPUAdam(parameters((100,), dtype=BF16), fp32_optimizer_states=False)
    resumed.load_state_dict(saved)
    assert next(iter(resumed.state.values()))["exp_avg"].dtype == BF16


def test_a_state_dict_of_deepspeeds_cpu_adam_is_taken() -> None:
    params = parameters((4,))
    averages = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.full((4,), 2.0)}
    group = {
        "lr": 0.5, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0,
        "amsgrad": False, "params": [0],
    }  # fmt: skip
    optimizer = CPUAdam(params)
    optimizer.load_state_dict({"state": {0: {"step": 7, **averages}}, "param_groups": [group]})
    give_gradients(params)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 8
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_hooks_see_and_may_change_what_is_loaded() -> None:
    saved = stepped(CPUAdam, parameters((4,), dtype=BF16), 3).state_dict()
    resumed = CPUAdam(parameters((4,), dtype=BF16))
    seen = []

    def double_steps(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state)
        changed["state"][0]["step"] *= 2
        return changed

    resumed.register_load_state_dict_pre_hook(double_steps)
    resumed.register_load_state_dict_post_hook(
        lambda o: seen.extend(state["exp_avg"].dtype for state in o.state.values())
    )
    resumed.load_state_dict(saved)
    assert next(iter(resumed.state.values()))["step"] == 6
    assert seen == [F32]


def test_a_refused_state_dict_changes_nothing() -> None:
    params = parameters((4,))
    optimizer = stepped(CPUAdam, params, 2)
    saved = torch.optim.AdamW(parameters((4,)), amsgrad=True).state_dict()
    with pytest.raises(UsageError, match=r"param_groups\[0\]: amsgrad"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[params[0]]["step"] == 2
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_duplicate_goes_on_where_the_original_does(duplicate: Any) -> None:
    params = parameters((5,), (6,), dtype=BF16)
    optimizer = stepped(CPUAdam, params, 3, fp32_optimizer_states=False)
    other = duplicate(optimizer)
    theirs = other.param_groups[0]["params"]
    give_gradients(params, theirs, seed=9)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))
    assert other.defaults["fp32_optimizer_states"] is False
