"""What CPUAdam, CPUAdagrad and CPULion share: the background, copies, rollback, refusals."""

from __future__ import annotations

import copy
import pickle
import threading
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
from torch import Tensor

from opkiln import optim
from opkiln.errors import UsageError

KINDS = ("CPUAdam", "CPUAdagrad", "CPULion")
pytestmark = pytest.mark.usefixtures("served_by")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return getattr(optim, request.param)


def state_of(optimizer: Any) -> list[Any]:
    """Everything a step changes, copied."""
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return [params, copy.deepcopy(optimizer.state_dict()["state"])]


def assert_untouched(optimizer: Any, before: list[Any]) -> None:
    params, states = state_of(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
    assert states.keys() == before[1].keys()
    for key, state in states.items():
        assert all(torch.equal(value, before[1][key][name]) for name, value in state.items())


# Steps


def test_lion_steps_as_its_formula_says() -> None:
    mine, other = twins(*SHAPES)
    optimizer = optim.CPULion(mine, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    averages = [torch.zeros_like(p) for p in other]
    for step in range(20):
        give_gradients(mine, other, seed=step)
        optimizer.step()
        with torch.no_grad():
            for param, average in zip(other, averages, strict=True):
                direction = (0.9 * average + 0.1 * param.grad).sign()
                param.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * direction)
                average.mul_(0.99).add_(0.01 * param.grad)
    assert_same(mine, other)


@pytest.mark.parametrize("maximize", [False, True])
def test_a_hundred_steps_of_adagrad_go_where_torchs_go(maximize: bool) -> None:
    mine, other = twins(*SHAPES)
    options = {
        "lr": 1e-1, "lr_decay": 1e-2, "eps": 1e-6, "weight_decay": 0.05,
        "initial_accumulator_value": 0.1, "maximize": maximize,
    }  # fmt: skip
    ours, theirs = optim.CPUAdagrad(mine, **options), torch.optim.Adagrad(other, **options)
    for step in range(100):
        give_gradients(mine, other, seed=step)
        ours.step()
        theirs.step()
    assert_same(mine, other)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_narrow_parameters_have_fp32_states_or_their_own(kind: Any, dtype: torch.dtype) -> None:
    for wide, expected in ((True, F32), (False, dtype)):
        params = parameters((33,), dtype=dtype)
        optimizer = stepped(kind, params, 1, fp32_optimizer_states=wide)
        states = [v for v in optimizer.state[params[0]].values() if isinstance(v, Tensor)]
        assert states
        assert {state.dtype for state in states} == {expected}


def test_groups_and_missing_gradients_are_stepped_apart(kind: Any) -> None:
    params = parameters((5,), (6,), (7,))
    groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 0.0}]
    optimizer = kind(groups)
    for step in range(4):
        give_gradients(params, seed=step)
        if step % 2:
            params[1].grad = None
        frozen = params[2].detach().clone()
        optimizer.step()
        assert torch.equal(params[2], frozen), "its group's learning rate is 0"
    assert [optimizer.state[p]["step"] for p in params] == [4, 2, 4]


def test_a_step_within_inference_mode_does_not_spoil_later_ones(kind: Any) -> None:
    params = parameters((5,))
    optimizer = kind(params)
    give_gradients(params)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


def test_a_step_counts_up_the_versions_of_what_it_writes(kind: Any) -> None:
    params = parameters((5,))
    optimizer = stepped(kind, params, 1)
    low = torch.zeros(5, dtype=BF16)
    states = [v for v in optimizer.state[params[0]].values() if isinstance(v, Tensor)]
    loss = (params[0] * params[0]).sum()
    give_gradients(params)
    before = [t._version for t in (params[0], *states, low)]
    optimizer.step(copies={params[0]: low})
    assert all(t._version > v for t, v in zip((params[0], *states, low), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("served_by", ["native"], indirect=True)
@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(each, marks=pytest.mark.full) for each in KINDS[1:])],
    indirect=True,
)  # fmt: skip
def test_a_compiled_step_with_copies_is_made_outside_of_the_graph(kind: Any) -> None:
    mine, other = twins((8,))
    give_gradients(mine, other)
    low = torch.zeros(8, dtype=BF16)
    ours = kind(mine)
    torch.compile(lambda: ours.step(copies={mine[0]: low}), backend="aot_eager")()
    kind(other).step()
    assert torch.equal(mine[0], other[0])
    assert torch.equal(low, other[0].to(BF16))


def test_odd_layouts_step_as_contiguous_ones(kind: Any) -> None:
    base = [p.detach() for p in parameters((2, 3, 4, 5), (6, 8), (6, 8))]
    odd = [
        base[0].to(memory_format=torch.channels_last).requires_grad_(),
        base[1].t().requires_grad_(),
        base[2].clone()[:, ::2].requires_grad_(),
    ]
    plain = [p.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for p in odd]
    optimizers = kind(odd), kind(plain)
    for step in range(3):
        give_gradients(odd, plain, seed=step)  # contiguous, whatever the parameter is
        for optimizer in optimizers:
            optimizer.step()
    assert_same(odd, plain)
    optimizers[0].rollback()
    assert [optimizers[0].state[p]["step"] for p in odd] == [2, 2, 2]


# Copies and rollback


def test_copies_receive_the_new_values_of_their_parameters_only(kind: Any) -> None:
    params = parameters((5,), (600,), (7,), (8,))
    copies = {params[0]: torch.zeros(5, dtype=BF16), params[1]: torch.zeros(600, dtype=F16),
              params[3]: torch.zeros(8)}  # fmt: skip
    give_gradients(params)
    optimizer = kind(params)
    optimizer.step(copies=copies)
    for param, low in copies.items():
        assert torch.equal(low, param.detach().to(low.dtype))
    params[0].grad = None
    before = copies[params[0]].clone()
    optimizer.step(copies=copies)
    assert torch.equal(copies[params[0]], before)
    assert torch.equal(copies[params[1]], params[1].detach().to(F16))


@pytest.mark.parametrize(
    ("low", "message"),
    [
        (torch.zeros(4), r"the copy of param_groups\[1\]\['params'\]\[0\] has 4 elements"),
        (torch.zeros(5, dtype=torch.int8), r"the copy of .* is torch.int8 on cpu"),
        (torch.zeros(5, device="meta"), r"the copy of .* is torch.float32 on meta"),
    ],
)
def test_a_wrong_copy_is_refused_by_name_before_anything_moves(
    kind: Any, low: Tensor, message: str
) -> None:
    params = parameters((3,), (5,))
    optimizer = kind([{"params": params[:1]}, {"params": params[1:]}])
    give_gradients(params)
    before = state_of(optimizer)
    with pytest.raises(UsageError, match=message):
        optimizer.step(copies={params[1]: low})
    assert_untouched(optimizer, before)


def test_rollback_undoes_the_last_step_once(kind: Any) -> None:
    params = parameters((50,), (7,))
    optimizer = stepped(kind, params, 3)
    copies = {params[0]: torch.zeros(50, dtype=BF16)}
    before = state_of(optimizer)
    give_gradients(params, seed=7)
    optimizer.step(copies=copies, grad_scale=4.0)
    moved = params[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 123.0
    optimizer.rollback()
    assert not torch.equal(params[0], moved)
    assert torch.equal(copies[params[0]], params[0].detach().to(BF16))
    params_after, states = state_of(optimizer)
    for got, expected in zip(params_after, before[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    for key, state in states.items():
        assert state["step"] == 3
        for name, value in state.items():
            torch.testing.assert_close(value, before[1][key][name], rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="no step to roll back"):
        optimizer.rollback()


# In the background


def test_a_step_in_the_background_is_the_same_step(kind: Any) -> None:
    mine, other = twins(*SHAPES)
    ours, theirs = kind(mine, lr=1e-2), kind(other, lr=1e-2)
    low = {mine[0]: torch.zeros(mine[0].shape, dtype=BF16)}
    for step in range(3):
        give_gradients(mine, other, seed=step)
        handle = ours.step_in_background(copies=low, grad_scale=2.0)
        ours.zero_grad()  # the step has what it needs
        ours.param_groups[0]["lr"] = 1e-2 / (step + 2)  # for the next one
        handle.wait()
        assert handle.done()
        theirs.step(grad_scale=2.0)
        theirs.param_groups[0]["lr"] = 1e-2 / (step + 2)
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert torch.equal(low[mine[0]], mine[0].detach().to(BF16))


def test_a_scheduler_goes_on_after_a_step_in_the_background(
    kind: Any, recwarn: pytest.WarningsRecorder
) -> None:
    params = parameters((4,))
    optimizer = kind(params)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    give_gradients(params)
    with optimizer.step_in_background():
        scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


class _Held:
    """The op's functions; those that make or undo a step wait until they are let go."""

    def __init__(self, ops: Any) -> None:
        self._ops, self.go = ops, threading.Event()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._ops, name)
        if not name.endswith("_"):
            return function

        def held(*args: Any, **kwargs: Any) -> Any:
            assert self.go.wait(60)
            return function(*args, **kwargs)

        return held


def test_nothing_else_is_done_while_a_step_is_in_flight(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters((4,))
    optimizer = stepped(kind, params, 1)
    saved, expected = optimizer.state_dict(), copy.deepcopy(optimizer)
    held = _Held(kind._ops["cpu"])
    monkeypatch.setattr(kind, "_ops", {"cpu": held})
    give_gradients(params)
    handle = optimizer.step_in_background()
    try:
        assert not handle.done()
        with pytest.raises(TimeoutError, match=r"still running after 0.01 s"):
            handle.wait(0.01)
        for forbidden in (
            optimizer.step,
            optimizer.step_in_background,
            optimizer.rollback,
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(saved),
            lambda: optimizer.add_param_group({"params": parameters((2,))}),
            lambda: optimizer.zero_grad(set_to_none=False),
            lambda: copy.deepcopy(optimizer),
        ):
            with pytest.raises(UsageError, match="while a step runs in the background"):
                forbidden()
    finally:
        held.go.set()
    handle.wait()
    theirs = expected.param_groups[0]["params"]
    give_gradients(theirs)
    expected.step()
    assert torch.equal(params[0], theirs[0])
    optimizer.rollback()
    optimizer.step()


def test_a_closed_handle_says_so(kind: Any) -> None:
    params = parameters((4,))
    optimizer = kind(params)
    give_gradients(params)
    with optimizer.step_in_background() as handle:
        handle.wait()
    before = state_of(optimizer)
    for ask in (handle.wait, handle.done, handle.__enter__):
        with pytest.raises(UsageError, match="this handle of a step is closed"):
            ask()
    handle.close()
    assert_untouched(optimizer, before)


def test_a_failure_in_the_background_is_told_once(kind: Any) -> None:
    params = parameters((4,), (3,))
    optimizer = stepped(kind, params, 1)
    name = kind.STATES[0]
    good, optimizer.state[params[1]][name] = optimizer.state[params[1]][name], torch.zeros(9)
    before = params[0].detach().clone()
    give_gradients(params)
    waited = optimizer.step_in_background()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"\[1\] has 9 elements, params\[1\] has 3"):
            waited.wait()
    forgotten = optimizer.step_in_background()
    while not forgotten.done():
        pass
    with pytest.raises(RuntimeError, match=r"\[1\] has 9 elements"):
        optimizer.step()
    assert torch.equal(params[0], before)
    optimizer.state[params[1]][name] = good
    optimizer.step()


def test_what_is_wrong_is_said_before_a_step_goes_to_the_background(kind: Any) -> None:
    params = parameters((4,))
    optimizer = kind(params)
    give_gradients(params)
    before = state_of(optimizer)
    for options in ({"grad_scale": 0.0}, {"copies": {torch.zeros(1): torch.zeros(1)}}):
        with pytest.raises(UsageError):
            optimizer.step_in_background(**options)
    assert_untouched(optimizer, before)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": -1.0}, "lr is -1"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused_by_name(
    kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        kind(parameters((3,)), **options)
    optimizer = kind(parameters((3,)))
    with pytest.raises(UsageError, match=message):
        optimizer.add_param_group({"params": parameters((4,)), **options})
    assert len(optimizer.param_groups) == 1


def test_a_learning_rate_that_becomes_nan_is_refused_before_anything_moves(kind: Any) -> None:
    params = parameters((3,), (4,))
    optimizer = kind([{"params": params[:1]}, {"params": params[1:]}])
    give_gradients(params)
    before = state_of(optimizer)
    optimizer.param_groups[1]["lr"] = torch.tensor(float("nan"))
    with pytest.raises(UsageError, match=r"param_groups\[1\]: lr is nan"):
        optimizer.step()
    assert_untouched(optimizer, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": float("nan")}, "eps is nan"),
        ({"lr_decay": -1.0}, "lr_decay is -1"),
        ({"initial_accumulator_value": float("nan")}, "initial_accumulator_value is nan"),
        ({"amsgrad": True}, "amsgrad is not supported"),
    ],
)
def test_adagrads_own_hyperparameters_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optim.CPUAdagrad(parameters((3,)), **options)


def test_lions_betas_are_checked() -> None:
    with pytest.raises(UsageError, match=r"betas\[1\] is 1.0"):
        optim.CPULion(parameters((3,)), betas=(0.9, 1.0))


def test_parameters_elsewhere_or_of_other_types_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(UsageError, match=r"\['params'\]\[1\] is on meta"):
        kind([*parameters((3,)), torch.zeros(3, device="meta", requires_grad=True)])
    with pytest.raises(UsageError, match=r"weight \(.*\) has dtype torch.float64"):
        kind([("weight", torch.zeros(3, dtype=torch.float64, requires_grad=True))])


@pytest.mark.parametrize("kind", ["CPUAdam", "CPULion"], indirect=True)
def test_a_sparse_gradient_is_refused_by_name_before_anything_moves(kind: Any) -> None:
    params = parameters((4,), (10, 3))
    optimizer = kind([{"params": params[:1]}, {"params": params[1:]}])
    give_gradients(params)
    params[1].grad = torch.zeros(10, 3).to_sparse()
    before = state_of(optimizer)
    with pytest.raises(UsageError, match=r"param_groups\[1\]\['params'\]\[0\] is sparse"):
        optimizer.step()
    assert_untouched(optimizer, before)


# State dicts


def test_training_moves_between_torch_and_adagrad_through_a_state_dict() -> None:
    mine, other = twins(*SHAPES)
    ours, theirs = stepped(optim.CPUAdagrad, mine, 5), stepped(torch.optim.Adagrad, other, 5)
    swapped_here, swapped_there = optim.CPUAdagrad(other), torch.optim.Adagrad(mine)
    swapped_here.load_state_dict(theirs.state_dict())
    swapped_there.load_state_dict(ours.state_dict())
    for step in range(5, 10):
        give_gradients(mine, other, seed=step)
        swapped_here.step()
        swapped_there.step()
    assert_same(mine, other)


def test_torchs_adagrad_takes_the_state_before_the_first_step() -> None:
    mine, other = twins((3, 4))
    theirs = torch.optim.Adagrad(other)
    theirs.load_state_dict(
        optim.CPUAdagrad(mine, initial_accumulator_value=0.5, lr=1e-2).state_dict()
    )
    give_gradients(mine, other)
    theirs.step()
    assert torch.equal(theirs.state[other[0]]["sum"], 0.5 + other[0].grad.square())


def test_loading_keeps_fp32_states_of_narrow_parameters(kind: Any) -> None:
    saved = stepped(kind, parameters((100,), dtype=BF16), 3).state_dict()
    resumed = kind(parameters((100,), dtype=BF16))
    resumed.load_state_dict(saved)
    (state,) = resumed.state.values()
    for name in kind.STATES:
        assert state[name].dtype == F32
        assert torch.equal(state[name], saved["state"][0][name])
    assert state["step"] == 3


@pytest.mark.parametrize(
    ("name", "saved", "group"),
    [
        (
            "CPUAdam",
            {"exp_avg": torch.full((4,), 2.0), "exp_avg_sq": torch.ones(4)},
            {"bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False},
        ),
        ("CPUAdagrad", {"exp_avg_sq": torch.full((4,), 2.0)}, {"eps": 1e-10, "amsgrad": False}),
        (
            "CPULion",
            {"exp_avg": torch.full((4,), 2.0), "exp_avg_sq": torch.zeros(4)},
            {"betas": (0.9, 0.99)},
        ),
    ],
)
def test_a_state_dict_of_deepspeeds_is_taken(
    name: str, saved: dict[str, Any], group: dict[str, Any]
) -> None:
    params = parameters((4,))
    optimizer = getattr(optim, name)(params)
    optimizer.load_state_dict(
        {
            "state": {0: {"step": 7, **copy.deepcopy(saved)}},
            "param_groups": [{"lr": 0.5, "weight_decay": 0, **group, "params": [0]}],
        }
    )
    assert torch.equal(optimizer.state[params[0]][optimizer.STATES[0]], torch.full((4,), 2.0))
    give_gradients(params)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 8
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_state_of_another_optimizer_is_refused_and_changes_nothing(kind: Any) -> None:
    optimizer = stepped(kind, parameters((4,)), 2)
    before = state_of(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = {"momentum_buffer": torch.zeros(4)}
    name = kind.STATES[0]
    with pytest.raises(UsageError, match=rf"state\[0\]: missing {name}; found momentum_buffer"):
        optimizer.load_state_dict(saved)
    assert_untouched(optimizer, before)


def test_a_refused_state_dict_changes_nothing(kind: Any) -> None:
    optimizer = stepped(kind, parameters((4,)), 2)
    before = state_of(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = float("nan")
    with pytest.raises(UsageError, match=r"param_groups\[0\]: lr is nan"):
        optimizer.load_state_dict(saved)
    assert_untouched(optimizer, before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_duplicate_goes_on_where_the_original_does(kind: Any, duplicate: Any) -> None:
    params = parameters((5,), (6,), dtype=BF16)
    optimizer = stepped(kind, params, 3, fp32_optimizer_states=False)
    other = duplicate(optimizer)
    theirs = other.param_groups[0]["params"]
    give_gradients(params, theirs, seed=9)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))
    assert other.defaults["fp32_optimizer_states"] is False
