"""FusedAdam's state dicts, to and from torch, CPUAdam and DeepSpeed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from adam_models import (
    BF16,
    F32,
    SHAPES,
    assert_same,
    give_gradients,
    parameters,
    stepped,
    through_a_file,
    twins,
)  # fmt: skip
from sample.references import references

from opkiln.errors import UsageError
from opkiln.optim import CPUAdam, FusedAdam

reference = references("fused_adam")


@pytest.fixture(autouse=True)
def _served_by_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedAdam, "_ops", {"cpu": reference})
    monkeypatch.setattr(CPUAdam, "_ops", {"cpu": references("cpu_adam")})


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": False, "foreach": True}])
@pytest.mark.parametrize("theirs", [torch.optim.AdamW, torch.optim.Adam])
def test_training_moves_between_torch_and_here_through_a_checkpoint(
    theirs: Any, options: dict[str, Any]
) -> None:
    mine, other = twins(*SHAPES)
    ours = stepped(FusedAdam, mine, 5, adam_w_mode=theirs is torch.optim.AdamW)
    torchs = stepped(theirs, other, 5, **options)
    swapped_here = FusedAdam(other)
    swapped_here.load_state_dict(through_a_file(torchs.state_dict()))
    swapped_there = theirs(mine, **options)
    swapped_there.load_state_dict(through_a_file(ours.state_dict()))
    for step in range(5, 10):
        give_gradients(mine, other, seed=step)
        swapped_here.step()
        swapped_there.step()
    assert_same(mine, other)
    assert swapped_here.param_groups[0]["decoupled_weight_decay"] is (theirs is torch.optim.AdamW)
    for optimizer in (swapped_here, swapped_there):
        assert {int(state["step"]) for state in optimizer.state.values()} == {10}


def test_training_moves_to_cpu_adam_and_back() -> None:
    mine, other = twins(*SHAPES)
    ours, cpu = stepped(FusedAdam, mine, 3), stepped(CPUAdam, other, 3)
    swapped_here, swapped_there = FusedAdam(other), CPUAdam(mine)
    swapped_here.load_state_dict(through_a_file(cpu.state_dict()))
    swapped_there.load_state_dict(through_a_file(ours.state_dict()))
    give_gradients(mine, other, seed=3)
    swapped_here.step()
    swapped_there.step()
    assert_same(mine, other)


def test_every_parameter_has_a_count_of_its_own_in_a_state_dict() -> None:
    mine, other = twins((3, 4), (5,))
    ours, theirs = stepped(FusedAdam, mine, 2), stepped(torch.optim.AdamW, other, 2)
    saved = ours.state_dict()["state"]
    for key, value in theirs.state_dict()["state"][0].items():
        assert (saved[0][key].dtype, saved[0][key].shape) == (value.dtype, value.shape), key
    assert saved[0]["step"] == saved[1]["step"] == 2
    # torch adds to each parameter's count: one tensor for two would be counted up twice.
    assert saved[0]["step"] is not saved[1]["step"]
    assert saved[0]["step"].data_ptr() != ours.state[mine[0]]["step"].data_ptr()


def test_equal_counts_are_shared_and_others_are_not_after_loading() -> None:
    params = parameters((3,), (4,), (5,))
    saved = stepped(torch.optim.AdamW, params, 2).state_dict()
    for count, shared in ((2.0, 1), (7.0, 2)):
        saved["state"][1]["step"] = torch.tensor(count)
        optimizer = FusedAdam(params)
        optimizer.load_state_dict(saved)
        assert len({id(state["step"]) for state in optimizer.state.values()}) == shared
        give_gradients(params)
        optimizer.step()
        steps = [int(optimizer.state[param]["step"]) for param in params]
        assert steps == [3, count + 1, 3]
        assert saved["state"][1]["step"] == count, "loading must not tie to what was loaded"


def test_loading_keeps_fp32_states_and_masters_of_narrow_parameters() -> None:
    params = parameters((100,), dtype=BF16)
    saved = through_a_file(stepped(FusedAdam, params, 3, master_weights=True).state_dict())
    resumed = FusedAdam(parameters((100,), dtype=BF16), master_weights=True)
    resumed.load_state_dict(saved)
    state = next(iter(resumed.state.values()))
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        assert state[name].dtype == F32
        assert torch.equal(state[name], saved["state"][0][name])
    plain = FusedAdam(parameters((100,), dtype=BF16))
    plain.load_state_dict(saved)
    assert "master_param" not in next(iter(plain.state.values()))


def test_a_master_that_a_state_dict_lacks_is_made_from_the_parameter() -> None:
    params = parameters((10,), dtype=BF16)
    saved = stepped(torch.optim.AdamW, params, 2).state_dict()
    optimizer = FusedAdam(params, master_weights=True)
    optimizer.load_state_dict(saved)
    give_gradients(params)
    optimizer.step()
    master = optimizer.state[params[0]]["master_param"]
    assert master.dtype == F32
    assert torch.equal(master.to(BF16), params[0])


@pytest.mark.parametrize("kind", [FusedAdam, CPUAdam])
def test_hooks_see_and_may_change_what_is_loaded(kind: Any) -> None:
    saved = stepped(kind, parameters((4,), dtype=BF16), 3).state_dict()
    resumed = kind(parameters((4,), dtype=BF16))
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


@pytest.mark.parametrize("kind", [FusedAdam, CPUAdam])
def test_a_refused_state_dict_changes_nothing(kind: Any) -> None:
    params = parameters((4,))
    optimizer = stepped(kind, params, 2)
    saved = torch.optim.AdamW(parameters((4,)), amsgrad=True).state_dict()
    with pytest.raises(UsageError, match=r"param_groups\[0\]: amsgrad"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[params[0]]["step"] == 2
    assert optimizer.param_groups[0]["lr"] == 1e-2
