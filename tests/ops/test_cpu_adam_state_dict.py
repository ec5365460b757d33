"""CPUAdam's state dicts, to and from torch. ``test_cpu_optimizers.py`` has what all have in common,
``test_fused_adam_state_dict.py`` what FusedAdam and CPUAdam have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adam_models import (
    BF16,
    SHAPES,
    assert_same,
    give_gradients,
    parameters,
    stepped,
    through_a_file,
    twins,
)  # fmt: skip

from opkiln.optim import CPUAdam

pytestmark = pytest.mark.usefixtures("served_by")


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


def test_loading_follows_the_choice_of_narrow_states() -> None:
    saved = stepped(CPUAdam, parameters((100,), dtype=BF16), 3).state_dict()
    resumed = CPUAdam(parameters((100,), dtype=BF16), fp32_optimizer_states=False)
    resumed.load_state_dict(saved)
    assert next(iter(resumed.state.values()))["exp_avg"].dtype == BF16
