"""Plans: steps over addresses that were kept, and everything that must make them be forgotten.

The CUDA kernels of fused_adam run on the CPU here, and FusedAdam is told that they have plans.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adam_models import BF16, assert_same, give_gradients, parameters, twins
from fused_fixtures import emulated_op
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.optim import FusedAdam

if TYPE_CHECKING:
    from collections.abc import Callable


class Counting:
    """The op's functions, with how often each was called."""

    def __init__(self) -> None:
        self._kernel = emulated_op("fused_adam")
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernel, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name.removeprefix("fused_adam"))
            return function(*args, **kwargs)

        return counted


@pytest.fixture(autouse=True)
def ops(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(FusedAdam, "_ops", {"cpu": counting})
    monkeypatch.setattr(FusedAdam, "KEPT_ON", ("cpu",))
    return counting


def pair(**options: Any) -> tuple[list[Tensor], list[Tensor], FusedAdam, torch.optim.Optimizer]:
    mine, other = twins((3, 5), (17,), (40,))
    ours = FusedAdam(mine, lr=1e-2, weight_decay=0.1, **options)
    return mine, other, ours, torch.optim.AdamW(other, lr=1e-2, weight_decay=0.1)


def step(mine: list[Tensor], other: list[Tensor], *optimizers: Any, seed: int) -> None:
    give_gradients(mine, other, seed=seed)  # new tensors each time
    for optimizer in optimizers:
        optimizer.step()


def test_lists_that_stay_are_kept_at_the_second_step_and_stepped_as_torchs(
    ops: Counting,
) -> None:
    mine, other, ours, theirs = pair()
    for seed in range(6):
        step(mine, other, ours, theirs, seed=seed)
    assert_same(mine, other)
    assert ops.calls == ["_", "_keep", *["_kept_"] * 5]
    assert {int(state["step"]) for state in ours.state.values()} == {6}


def replaced_storage(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    mine[1].data = mine[1].data.clone()


def odd_address(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    mine[1].data = torch.cat([torch.zeros(1), mine[1].data])[1:]


def replaced_state_storage(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for state in ours.state[mine[1]].values():
        state.data = state.data.clone()
        gc.collect()


def replaced_count_storage(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    step = ours.state[mine[1]]["step"]
    step.data = step.data.clone()


def replaced_average(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for params, optimizer in ((mine, ours), (other, theirs)):
        optimizer.state[params[1]]["exp_avg"] = torch.full((17,), 0.5)


def replaced_state(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for params, optimizer in ((mine, ours), (other, theirs)):
        state = dict(optimizer.state[params[1]])
        state["exp_avg"] = torch.full((17,), 0.5)
        state["step"] = state["step"].clone()
        optimizer.state[params[1]] = state


def removed_state(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    del ours.state[mine[1]], theirs.state[other[1]]


def loaded(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for optimizer in (ours, theirs):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1]["exp_avg"].fill_(0.5)
        optimizer.load_state_dict(saved)


def less_parameters(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for params, optimizer in ((mine, ours), (other, theirs)):
        optimizer.param_groups[0]["params"] = [params[2], params[0]]


def another_group(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for params, optimizer in ((mine, ours), (other, theirs)):
        optimizer.param_groups[0]["params"] = params[:2]
        optimizer.add_param_group({"params": params[2:], "lr": 1e-3})


def missing_gradient(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    mine[0].grad = other[0].grad = None


def replaced_gradient_storage(
    mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any
) -> None:
    for params in (mine, other):
        params[1].grad.data = params[1].grad.data * 2


def changed_gradient(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for params in (mine, other):
        params[1].grad.mul_(2)


def narrow_gradient(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    narrow = mine[1].grad.to(BF16)
    mine[1].grad.data, other[1].grad = narrow, narrow.float()


def another_rate(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for optimizer in (ours, theirs):
        optimizer.param_groups[0].update(lr=0.1, betas=(0.5, 0.6))


def written_parameter(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    for params in (mine, other):
        with torch.no_grad():
            params[1].mul_(2)


def strided_gradient(mine: list[Tensor], other: list[Tensor], ours: Any, theirs: Any) -> None:
    mine[0].grad = mine[0].grad.t().contiguous().t()
    assert not mine[0].grad.is_contiguous()


@pytest.mark.parametrize(
    "change",
    [
        replaced_storage, odd_address, replaced_state_storage, replaced_count_storage,
        replaced_average, replaced_state, removed_state, loaded, less_parameters, another_group,
        missing_gradient, replaced_gradient_storage, changed_gradient, narrow_gradient,
        another_rate, written_parameter, strided_gradient,
    ],
)  # fmt: skip
def test_a_plan_does_not_outlive_what_it_was_made_for(
    change: Callable[..., None], ops: Counting
) -> None:
    mine, other, ours, theirs = pair()
    for seed in range(3):
        step(mine, other, ours, theirs, seed=seed)
    give_gradients(mine, other, seed=3)
    change(mine, other, ours, theirs)
    ours.step()
    theirs.step()
    for seed in range(4, 8):
        step(mine, other, ours, theirs, seed=seed)
    assert_same(mine, other)
    # Of a plain dict it is not known when an entry is replaced: there is no plan then.
    planned = change is not replaced_state
    assert (ops.calls[-1] == "_kept_") is planned


def test_gradients_that_come_and_go_are_stepped_as_torchs() -> None:
    mine, other, ours, theirs = pair()
    for seed in range(12):
        give_gradients(mine, other, seed=seed)
        if seed % 3 == 0:
            mine[seed % 2].grad = other[seed % 2].grad = None
        ours.step()
        theirs.step()
    assert_same(mine, other)
    for a, b in zip(mine, other, strict=True):
        assert ours.state[a]["step"] == theirs.state[b]["step"]


def test_a_stale_gradient_is_noticed(ops: Counting) -> None:
    mine, other, ours, theirs = pair()
    for seed in range(3):
        step(mine, other, ours, theirs, seed=seed)
    loss = (mine[1] * mine[1]).sum()
    state = ours.state[mine[1]]
    versions = {name: tensor._version for name, tensor in state.items()}
    ours.step()
    assert ops.calls[-1] == "_kept_"
    assert {name: state[name]._version - old for name, old in versions.items()} == {
        "step": 1, "exp_avg": 1, "exp_avg_sq": 1,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_sparse_gradient_of_a_later_group_is_refused_before_anything_moves() -> None:
    params = parameters((4,), (10, 3))
    optimizer = FusedAdam([{"params": params[:1]}, {"params": params[1:]}])
    for seed in range(3):
        give_gradients(params, seed=seed)
        optimizer.step()
    before = params[0].detach().clone()
    params[1].grad = torch.zeros(10, 3).to_sparse()
    with pytest.raises(UsageError, match=r"param_groups\[1\]\['params'\]\[0\] is sparse"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_masters_are_kept_too(ops: Counting) -> None:
    narrow, wide = parameters((33,), dtype=BF16), parameters((33,))
    wide[0].data.copy_(narrow[0].detach())
    ours = FusedAdam(narrow, lr=1e-3, master_weights=True)
    theirs = torch.optim.AdamW(wide, lr=1e-3, weight_decay=0.0)
    for seed in range(5):
        give_gradients(narrow, seed=seed)
        wide[0].grad = narrow[0].grad.float()
        ours.step()
        theirs.step()
    assert ops.calls[-1] == "_kept_"
    assert_same([ours.state[narrow[0]]["master_param"]], wide)
    assert torch.equal(narrow[0], ours.state[narrow[0]]["master_param"].to(BF16))


def test_scaling_and_clipping_reach_a_kept_step(ops: Counting) -> None:
    mine, other, ours, theirs = pair(max_grad_norm=0.5)
    for seed in range(5):
        give_gradients(mine, other, seed=seed)
        for param in mine:
            param.grad = param.grad * 16
        ours.grad_scale, ours.found_inf = torch.tensor(16.0), torch.tensor(float(seed == 3))
        ours.step()
        for param in other:
            param.grad = param.grad.clone()
        torch.nn.utils.clip_grad_norm_(other, 0.5)
        if seed != 3:
            theirs.step()
    assert ops.calls[-1] == "_kept_"
    assert_same(mine, other)


def test_a_step_in_a_compiled_function_is_kept_too(ops: Counting) -> None:
    mine, other, ours, theirs = pair()
    compiled = torch.compile(ours.step, backend="aot_eager")
    for seed in range(4):
        give_gradients(mine, other, seed=seed)
        compiled()
        theirs.step()
    assert_same(mine, other)
    assert ops.calls == ["_", "_keep", *["_kept_"] * 3]


def test_states_are_gone_with_the_optimizer() -> None:
    mine, other, ours, theirs = pair()
    for seed in range(3):
        step(mine, other, ours, theirs, seed=seed)
    state = weakref.ref(ours.state[mine[0]]["exp_avg"])
    gc.disable()  # it should need no collection of cycles
    try:
        del ours
        assert state() is None
    finally:
        gc.enable()


def test_parameters_with_other_strides_are_never_planned(ops: Counting) -> None:
    base = torch.randn(6, 8)
    param = base.t().requires_grad_()
    optimizer = FusedAdam([param])
    for seed in range(4):
        param.grad = torch.full((6, 8), float(seed)).t()
        optimizer.step()
    assert "_kept_" not in ops.calls
