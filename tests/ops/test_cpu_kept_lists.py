"""Lists that the ops of the CPU optimizers keep from step to step, and what makes them let go."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adam_models import BF16, F32, give_gradients, parameters, twins
from torch import Tensor

from opkiln import get_builder, optim
from opkiln.errors import UsageError
from opkiln.ops.optimizing.op_calls import Status

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = {"CPUAdam": "cpu_adam", "CPUAdagrad": "cpu_adagrad", "CPULion": "cpu_lion"}
SHAPES = ((3, 5), (17,), (40,))


class Counting:
    """The op's functions, with the names of those that were called."""

    def __init__(self, op: str) -> None:
        self._ops, self._op = get_builder(op).load(), op
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name.removeprefix(self._op))
            return function(*args, **kwargs)

        return counted


class Pair:
    """An optimizer whose lists are kept, and one that hands its lists over at each step."""

    def __init__(self, name: str, dtype: torch.dtype = F32) -> None:
        kind = getattr(optim, name)
        self.ops = Counting(KINDS[name])
        self.mine, self.other = twins(*SHAPES, dtype=dtype)
        self.ours, self.theirs = (
            kind(params, lr=1e-2, weight_decay=0.1) for params in (self.mine, self.other)
        )
        self.ours._ops = {"cpu": self.ops}

    def both(self) -> list[tuple[list[Tensor], Any]]:
        return [(self.mine, self.ours), (self.other, self.theirs)]

    def step(self, seed: int) -> None:
        give_gradients(self.mine, self.other, seed=seed)  # new tensors each time
        self.make()

    def make(self, **options: Any) -> None:
        self.ours.step(**options)
        self.theirs._plans.forget()
        self.theirs.step(**options)

    def assert_same(self) -> None:
        for a, b in zip(self.mine, self.other, strict=True):
            assert torch.equal(a, b)
            mine, other = self.ours.state[a], self.theirs.state[b]
            assert mine["step"] == other["step"]
            for entry in self.ours.STATES:
                assert torch.equal(mine[entry], other[entry])


@pytest.fixture(params=list(KINDS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(name: str, native_optimizer: None) -> Pair:
    """After three steps: its lists are kept."""
    pair = Pair(name)
    for seed in range(3):
        pair.step(seed)
    assert pair.ops.calls == ["_", "_keep", "_kept_", "_kept_"]
    return pair


def test_a_kept_list_is_stepped_as_one_that_is_handed_over(pair: Pair) -> None:
    for seed in range(3, 8):
        pair.step(seed)
    pair.assert_same()
    assert pair.ops.calls[-6:] == ["_kept_"] * 6
    assert {pair.ours.state[param]["step"] for param in pair.mine} == {8}


def test_narrow_parameters_are_kept_too(name: str, native_optimizer: None) -> None:
    pair = Pair(name, BF16)
    for seed in range(4):
        pair.step(seed)
    pair.assert_same()
    assert pair.ops.calls[-1] == "_kept_"


def replaced_storage(pair: Pair) -> None:
    pair.mine[1].data = pair.mine[1].data.clone()


def shared_memory(pair: Pair) -> None:
    pair.mine[1].share_memory_()


def an_odd_address(pair: Pair) -> None:
    pair.mine[1].data = torch.cat([torch.zeros(1), pair.mine[1].data])[1:]


def replaced_state_storage(pair: Pair) -> None:
    state = pair.ours.state[pair.mine[1]][pair.ours.STATES[0]]
    state.data = state.data.clone()


def replaced_entry(pair: Pair) -> None:
    for params, optimizer in pair.both():
        optimizer.state[params[1]][optimizer.STATES[0]] = torch.full((17,), 0.5)


def replaced_count(pair: Pair) -> None:
    for params, optimizer in pair.both():
        optimizer.state[params[1]]["step"] = 20


def replaced_state(pair: Pair) -> None:
    for params, optimizer in pair.both():
        entries = {entry: torch.full((17,), 0.5) for entry in optimizer.STATES}
        optimizer.state[params[1]] = {"step": 7, **entries}


def removed_state(pair: Pair) -> None:
    for params, optimizer in pair.both():
        del optimizer.state[params[1]]


def loaded(pair: Pair) -> None:
    for _, optimizer in pair.both():
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1][optimizer.STATES[0]].fill_(0.5)
        optimizer.load_state_dict(saved)


def less_parameters(pair: Pair) -> None:
    for params, optimizer in pair.both():
        optimizer.param_groups[0]["params"] = [params[2], params[0]]


def less_parameters_of_the_same_list(pair: Pair) -> None:
    for _, optimizer in pair.both():
        optimizer.param_groups[0]["params"].pop()


def another_group(pair: Pair) -> None:
    for params, optimizer in pair.both():
        optimizer.param_groups[0]["params"] = params[:2]
        optimizer.add_param_group({"params": params[2:], "lr": 1e-3})


def missing_gradient(pair: Pair) -> None:
    pair.mine[0].grad = pair.other[0].grad = None


def strided_gradient(pair: Pair) -> None:
    for params, _ in pair.both():
        params[0].grad = params[0].grad.t().contiguous().t()
        assert not params[0].grad.is_contiguous()


def narrow_gradient(pair: Pair) -> None:
    for params, _ in pair.both():
        params[1].grad.data = params[1].grad.to(BF16)


def rolled_back(pair: Pair) -> None:
    for _, optimizer in pair.both():
        optimizer.step()
        optimizer.rollback()


def with_copies(pair: Pair) -> None:
    copies = [{params[0]: torch.zeros(3, 5, dtype=BF16)} for params, _ in pair.both()]
    pair.ours.step(copies=copies[0])
    pair.theirs.step(copies=copies[1])
    for low, (params, _) in zip(copies, pair.both(), strict=True):
        assert torch.equal(low[params[0]], params[0].detach().to(BF16))


def in_the_background(pair: Pair) -> None:
    pair.ours.step_in_background().wait()
    pair.theirs.step()


@pytest.mark.parametrize(
    "change",
    [
        replaced_storage, shared_memory, an_odd_address, replaced_state_storage, replaced_entry,
        replaced_count, replaced_state, removed_state, loaded, less_parameters,
        less_parameters_of_the_same_list, another_group, missing_gradient, strided_gradient,
        narrow_gradient, rolled_back, with_copies, in_the_background,
    ],
)  # fmt: skip
def test_what_changes_between_steps_is_seen(change: Callable[[Pair], None], pair: Pair) -> None:
    give_gradients(pair.mine, pair.other, seed=3)
    change(pair)
    pair.make()
    for seed in range(4, 8):
        pair.step(seed)
    pair.assert_same()
    # Of a plain dict it is not known when an entry is replaced; parameters that are at different
    # steps take several calls. Nothing is kept then.
    apart = (replaced_state, replaced_count, removed_state, missing_gradient)
    assert (pair.ops.calls[-1] == "_kept_") is (change not in apart)


def test_lists_that_an_op_has_lost_are_handed_over_and_kept_again(pair: Pair) -> None:
    (kept,) = pair.ours._plans.of_group.values()
    getattr(pair.ops._ops, f"{pair.ops._op}_forget")(*kept.handles)
    del kept
    for seed in range(3, 8):
        pair.step(seed)
    pair.assert_same()
    again = ["_kept_", "_", "_forget", "_", "_keep", "_kept_", "_kept_", "_kept_"]
    assert pair.ops.calls[4:] == again


def test_gradients_that_come_and_go_are_seen(name: str, native_optimizer: None) -> None:
    pair = Pair(name)
    for seed in range(12):
        give_gradients(pair.mine, pair.other, seed=seed)
        if seed % 3 == 0:
            pair.mine[seed % 2].grad = pair.other[seed % 2].grad = None
        pair.make()
    pair.assert_same()


def test_versions_are_counted_up_and_a_stale_gradient_is_noticed(pair: Pair) -> None:
    written = [pair.mine[1], *(pair.ours.state[pair.mine[1]][s] for s in pair.ours.STATES)]
    loss = (pair.mine[1] * pair.mine[1]).sum()
    versions = [tensor._version for tensor in written]
    pair.step(3)
    assert pair.ops.calls[-1] == "_kept_"
    assert [tensor._version for tensor in written] == [version + 1 for version in versions]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def cut_parameter(pair: Pair) -> None:
    pair.mine[1].data = pair.mine[1].data[:5]


def cut_state(pair: Pair) -> None:
    pair.ours.state[pair.mine[1]][pair.ours.STATES[0]].resize_(5)


def cut_gradient(pair: Pair) -> None:
    pair.mine[1].grad.data = pair.mine[1].grad.data[:5]


def gradient_of_integers(pair: Pair) -> None:
    pair.mine[1].grad.data = torch.ones(17, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut_parameter, r"grads\[1\] has 17 elements, params\[1\] has 5"),
        (cut_state, r"\[1\] has 5 elements, params\[1\] has 17"),
        (cut_gradient, r"grads\[1\] has 5 elements, params\[1\] has 17"),
        (gradient_of_integers, r"grads\[1\] has dtype int64"),
    ],
)
def test_what_does_not_go_together_any_more_is_refused_by_name_before_anything_moves(
    change: Callable[[Pair], None], message: str, pair: Pair
) -> None:
    give_gradients(pair.mine, seed=3)
    change(pair)
    states = [pair.ours.state[param] for param in pair.mine]
    tensors = [*pair.mine, *(state[entry] for state in states for entry in pair.ours.STATES)]
    before = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=message):
        pair.ours.step()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert {state["step"] for state in states} == {3}


def test_a_sparse_gradient_of_a_later_group_is_refused_before_anything_moves() -> None:
    params = parameters((4,), (10, 3))
    optimizer = optim.CPUAdam([{"params": params[:1]}, {"params": params[1:]}])
    for seed in range(3):
        give_gradients(params, seed=seed)
        optimizer.step()
    before = params[0].detach().clone()
    params[1].grad = torch.zeros(10, 3).to_sparse()
    with pytest.raises(UsageError, match=r"param_groups\[1\]\['params'\]\[0\] is sparse"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_parameters_with_other_strides_are_never_kept(name: str, native_optimizer: None) -> None:
    param = torch.randn(6, 8).t().requires_grad_()
    optimizer = getattr(optim, name)([param])
    ops = Counting(KINDS[name])
    optimizer._ops = {"cpu": ops}
    for seed in range(4):
        param.grad = torch.full((6, 8), float(seed)).t()
        optimizer.step()
    assert set(ops.calls) == {"_"}


@pytest.mark.parametrize("through", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_keeps_lists_of_its_own(through: Callable[[Any], Any], pair: Pair) -> None:
    pair.ours._ops = {}
    copied = through(pair.ours)
    params = copied.param_groups[0]["params"]
    before = [param.detach().clone() for param in pair.mine]
    for seed in range(3, 6):
        give_gradients(params, pair.other, seed=seed)
        copied.step()
        pair.theirs.step()
    assert all(torch.equal(a, b) for a, b in zip(params, pair.other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(pair.mine, before, strict=True))


def test_states_and_parameters_are_gone_with_the_optimizer(name: str, pair: Pair) -> None:
    ours = pair.ours
    watched = [
        weakref.ref(tensor) for tensor in (pair.mine[0], ours.state[pair.mine[0]][ours.STATES[0]])
    ]
    gc.disable()  # they should need no collection of cycles
    try:
        del ours, pair.ours, pair.mine
        assert [tensor() for tensor in watched] == [None, None]
    finally:
        gc.enable()


def test_states_that_were_replaced_by_a_state_dict_are_gone(pair: Pair) -> None:
    state = weakref.ref(pair.ours.state[pair.mine[0]][pair.ours.STATES[0]])
    saved = copy.deepcopy(pair.ours.state_dict())
    gc.disable()
    try:
        pair.ours.load_state_dict(saved)
        assert state() is None
    finally:
        gc.enable()


def test_a_step_over_kept_lists_returns_a_status_before_it_writes(
    name: str, native_optimizer: None
) -> None:
    op = KINDS[name]
    ops = get_builder(op).load()
    keep, kept, forget = (getattr(ops, f"{op}_{what}") for what in ("keep", "kept_", "forget"))
    states = [[torch.zeros(3, 2)] for _ in getattr(optim, name).STATES]
    ticket = keep([param := torch.ones(3, 2)], [torch.ones(3, 2)], *states, [])
    other = torch.ones(3, requires_grad=True)
    other.grad = torch.ones(3)
    (call,) = getattr(optim, name)([other])._calls({}, 1.0)
    hyper = call.hyper
    assert kept(ticket, [torch.ones(3, 2)], **hyper) == Status.MADE
    before = [tensor.clone() for tensor in (param, *(row[0] for row in states))]
    for odd in (torch.ones(2, 3).t(), torch.ones(3, 4)[:, ::2], torch.ones(1).expand(3, 2)):
        assert kept(ticket, [odd], **hyper) == Status.LAYOUT
    with pytest.raises(RuntimeError, match="grads has 2 tensors, params has 1"):
        kept(ticket, [torch.ones(3, 2), torch.ones(3, 2)], **hyper)
    forget(ticket)
    forget(ticket)  # a second time does nothing
    assert kept(ticket, [torch.ones(3, 2)], **hyper) == Status.NOT_KEPT
    with pytest.raises(RuntimeError, match="ticket is not from this op"):
        kept(torch.ones(3), [torch.ones(3, 2)], **hyper)
    after = [param, *(row[0] for row in states)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
