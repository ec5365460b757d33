"""CPUAdam: as torch's Adam and AdamW, its state dicts, copies, rollback, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.optim import CPUAdam
from opkiln.settings import override

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(params=["native", "reference"], autouse=True)
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs each test on the native op and on the reference."""
    if request.param == "native":
        ops = request.getfixturevalue("native_adam")
    else:
        from opkiln.ops.cpu_adam import reference as ops
    monkeypatch.setattr(CPUAdam, "_ops", ops)
    return str(request.param)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def twins(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> tuple[list[Tensor], list[Tensor]]:
    return parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)


def give_gradients(*models: list[Tensor], seed: int = 0) -> None:
    """The same gradients to each model."""
    generator = torch.Generator().manual_seed(seed)
    for members in zip(*models, strict=True):
        grad = torch.randn(members[0].shape, generator=generator)
        for param in members:
            param.grad = grad.to(param.dtype).contiguous()


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)


SHAPES = ((3, 5), (17,), (), (64, 33), (0,))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("adamw_mode", "theirs"), [(True, "AdamW"), (False, "Adam")])
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
        return float(loss)

    losses = [optimizer.step(closure) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_gradients_are_divided_by_the_scale() -> None:
    mine, other = twins((9,))
    give_gradients(mine, other)
    mine[0].grad.mul_(1024)
    CPUAdam(mine).step(grad_scale=1024.0)
    CPUAdam(other).step()
    assert torch.equal(mine[0], other[0])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_narrow_parameters_have_fp32_states_or_their_own(dtype: torch.dtype) -> None:
    for wide, expected in ((True, F32), (False, dtype)):
        params = parameters((33,), dtype=dtype)
        give_gradients(params)
        optimizer = CPUAdam(params, fp32_optimizer_states=wide)
        optimizer.step()
        state = optimizer.state[params[0]]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == expected


# State dicts


def stepped(kind: Any, params: list[Tensor], steps: int, **options: Any) -> Any:
    optimizer = kind(params, lr=1e-2, weight_decay=0.1, **options)
    for step in range(steps):
        give_gradients(params, seed=step)
        optimizer.step()
    return optimizer


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


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]  # noqa: S301
)
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
    assert torch.equal(params[1], before), "its group's learning rate is 0"
    assert (params[0] < 0).all(), "it moved from 0 against the average that was put there"


# Copies and rollback


def test_copies_receive_the_new_values_of_their_parameters_only() -> None:
    params = parameters((5,), (600,), (7,))
    copies = {params[0]: torch.zeros(5, dtype=BF16), params[1]: torch.zeros(600, dtype=F16)}
    give_gradients(params)
    optimizer = CPUAdam(params)
    optimizer.step(copies=copies)
    for param, low in copies.items():
        assert torch.equal(low, param.detach().to(low.dtype))
    params[0].grad = None
    before = copies[params[0]].clone()
    optimizer.step(copies=copies)
    assert torch.equal(copies[params[0]], before)
    assert torch.equal(copies[params[1]], params[1].detach().to(F16))


def test_a_copy_of_a_stranger_is_refused() -> None:
    params = parameters((5,))
    give_gradients(params)
    with pytest.raises(UsageError, match=r"no parameters here, of shapes \(3,\)"):
        CPUAdam(params).step(copies={torch.zeros(3): torch.zeros(3)})


def test_rollback_undoes_the_last_step_with_the_learning_rate_it_had() -> None:
    params = parameters((50,), (7,))
    optimizer = stepped(CPUAdam, params, 3)
    copies = {params[0]: torch.zeros(50, dtype=BF16)}
    before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    give_gradients(params, seed=7)
    optimizer.step(copies=copies, grad_scale=4.0)
    moved = params[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 123.0
    optimizer.rollback()
    assert not torch.equal(params[0], moved)
    for param, value in zip(params, before[1], strict=True):
        torch.testing.assert_close(param.detach(), value, rtol=1e-6, atol=1e-7)
    for key, state in optimizer.state_dict()["state"].items():
        assert state["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            expected = before[0]["state"][key][name]
            torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(copies[params[0]], params[0].detach().to(BF16))


def test_rollback_needs_a_step_and_its_gradients() -> None:
    params = parameters((5,))
    optimizer = CPUAdam(params)
    with pytest.raises(UsageError, match="no step to roll back"):
        optimizer.rollback()
    give_gradients(params)
    optimizer.step()
    after = params[0].detach().clone()
    grad, params[0].grad = params[0].grad, None
    with pytest.raises(UsageError, match="gradient of the last step is gone"):
        optimizer.rollback()
    assert torch.equal(params[0], after)
    params[0].grad = grad
    optimizer.rollback()
    with pytest.raises(UsageError, match="no step to roll back"):
        optimizer.rollback()


# Layouts


def test_channels_last_and_transposed_and_gappy_parameters_step_as_in_torch() -> None:
    def make() -> list[Tensor]:
        base = parameters((2, 3, 4, 5), (6, 8), (6, 8))
        odd = [
            base[0].detach().to(memory_format=torch.channels_last),
            base[1].detach().t(),
            base[2].detach()[:, ::2],
        ]
        return [tensor.requires_grad_() for tensor in odd]

    mine, other = make(), make()
    ours, theirs = CPUAdam(mine), torch.optim.AdamW(other, weight_decay=0.0)
    for step in range(3):
        give_gradients(mine, other, seed=step)  # contiguous, whatever the parameter is
        ours.step()
        theirs.step()
    assert_same(mine, other)
    ours.rollback()
    assert [state["step"] for state in ours.state.values()] == [2, 2, 2]


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": -1.0}, "lr is -1"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1"),
        ({"betas": (0.9, float("nan"))}, r"betas\[1\] is nan"),
        ({"amsgrad": True}, "amsgrad is not supported"),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        CPUAdam(parameters((3,)), **options)
    optimizer = CPUAdam(parameters((3,)))
    with pytest.raises(UsageError, match=message):
        optimizer.add_param_group({"params": parameters((4,)), **options})
    assert len(optimizer.param_groups) == 1


def test_parameters_elsewhere_or_of_other_types_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"\['params'\]\[1\] is on meta"):
        CPUAdam([*parameters((3,)), torch.zeros(3, device="meta", requires_grad=True)])
    with pytest.raises(UsageError, match=r"weight \(.*\) has dtype torch.float64"):
        CPUAdam([("weight", torch.zeros(3, dtype=torch.float64, requires_grad=True))])


def test_a_sparse_gradient_is_refused_by_name_before_anything_moves() -> None:
    params = parameters((4,), (10, 3))
    before = params[0].detach().clone()
    optimizer = CPUAdam([{"params": params[:1]}, {"params": params[1:]}])
    give_gradients(params)
    params[1].grad = torch.zeros(10, 3).to_sparse()
    with pytest.raises(UsageError, match=r"param_groups\[1\]\['params'\]\[0\] is sparse"):
        optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_meaningless_gradient_scale_is_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="grad_scale is"):
        CPUAdam(parameters((3,))).step(grad_scale=scale)


# Loading and compiling


def test_the_first_step_falls_back_with_one_warning_where_nothing_may_be_built(
    served_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if served_by == "native":
        pytest.skip("the op is loaded in this process")
    monkeypatch.setattr(CPUAdam, "_ops", None)
    params = parameters((3,))
    give_gradients(params)
    before = params[0].detach().clone()
    with override(jit=False, fallback="warn"), warnings.catch_warnings(record=True):
        CPUAdam(params).step()
    assert not torch.equal(params[0], before)


def test_a_compiled_step_steps() -> None:
    mine, other = twins((8,))
    give_gradients(mine, other)
    ours = CPUAdam(mine)
    torch.compile(ours.step, backend="aot_eager")()
    CPUAdam(other).step()
    assert torch.equal(mine[0], other[0])


def test_importing_the_front_end_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, opkiln.optim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
