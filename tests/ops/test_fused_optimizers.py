"""FusedLion and FusedLamb: many steps, options, state dicts; what all fused optimizers share."""

from __future__ import annotations

import copy
from typing import Any

import fused_lamb_oracle as lamb
import fused_lion_oracle as lion
import pytest
import torch
from adam_models import (
    BF16,
    F32,
    SHAPES,
    give_gradients,
    parameters,
    stepped,
    through_a_file,
    twins,
)  # fmt: skip
from fused_fixtures import native
from sample import wanted
from sample.references import references
from torch import Tensor

import opkiln
from opkiln.errors import ToolchainError, UsageError
from opkiln.machine.binary import elf, fatbin
from opkiln.ops.optimizing.op_calls import Status
from opkiln.optim import FusedAdam, FusedLamb, FusedLion

ALL = [FusedAdam, FusedLion, FusedLamb]


@pytest.fixture(params=["native", "reference"])
def _served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ALL:
        reference = references(kind.BUILDER.NAME)
        ops = native(kind.BUILDER.NAME) if request.param == "native" else reference
        monkeypatch.setattr(kind, "_ops", {"cpu": ops})


@pytest.fixture
def _served_by_references(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ALL:
        reference = references(kind.BUILDER.NAME)
        monkeypatch.setattr(kind, "_ops", {"cpu": reference})


@pytest.mark.usefixtures("_served_by")
def test_steps_of_lion_go_where_float64_goes() -> None:
    (param,) = parameters((64, 33))
    optimizer = FusedLion([param], lr=1e-2, betas=(0.8, 0.95), weight_decay=0.05)
    hyper = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.05, "maximize": False}
    exact = [param.detach().double(), torch.zeros(64, 33, dtype=torch.float64)]
    sure = torch.ones(64, 33, dtype=torch.bool)
    for step in range(20):
        give_gradients([param], seed=step)
        optimizer.step()
        *exact, blend = lion.oracle(exact[0], param.grad, exact[1], hyper)
        sure &= blend.abs() > 1e-6
    torch.testing.assert_close(param.detach().double()[sure], exact[0][sure], rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_served_by")
def test_steps_of_lamb_go_where_float64_goes_and_its_coefficients_are_given() -> None:
    params = parameters((64, 33), (5,))
    optimizer = FusedLamb(
        params, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05, max_coeff=2.0
    )
    hyper = {
        **lamb.HYPER, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.05, "max_coeff": 2.0,
    }  # fmt: skip
    exact = [
        [p.detach().double(), *(torch.zeros_like(p).double() for _ in range(2))] for p in params
    ]
    assert optimizer.coefficients() == []
    for step in range(20):
        give_gradients(params, seed=step)
        optimizer.step()
        ratios = []
        for state, param in zip(exact, params, strict=True):
            *state[:], ratio = lamb.oracle(
                state[0], param.grad, *state[1:], {**hyper, "step": step + 1}
            )
            ratios.append(ratio)
        given = optimizer.coefficients()
        assert all(a is b for (a, _), b in zip(given, params, strict=True))
        assert [float(value) for _, value in given] == pytest.approx(ratios, rel=1e-5)
    for param, state in zip(params, exact, strict=True):
        torch.testing.assert_close(param.detach().double(), state[0], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_served_by")
@pytest.mark.parametrize("kind", ALL)
def test_clipped_steps_are_those_of_gradients_that_were_clipped(kind: Any) -> None:
    mine, other = twins(*SHAPES)
    groups = [[{"params": params[:2]}, {"params": params[2:]}] for params in (mine, other)]
    ours, plain = kind(groups[0], lr=1e-2, max_grad_norm=0.5), kind(groups[1], lr=1e-2)
    for step in range(5):
        give_gradients(mine, other, seed=step)
        scale = 1e-3 if step == 4 else 1.0  # the last are below the limit already
        for param in (*mine, *other):
            param.grad = param.grad * scale
        before = [param.grad.clone() for param in mine]
        ours.step()
        torch.nn.utils.clip_grad_norm_(other, 0.5)
        plain.step()
        assert all(torch.equal(p.grad, old) for p, old in zip(mine, before, strict=True))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_served_by_references")
def test_clipping_sees_gradients_without_their_scale() -> None:
    mine, other = twins((8,), (3,))
    ours, plain = FusedAdam(mine, lr=1e-2, max_grad_norm=0.5), FusedAdam(other, lr=1e-2)
    give_gradients(mine, other)
    for param in mine:
        param.grad = param.grad * 64
    ours.grad_scale = torch.tensor(64.0)
    ours.step()
    torch.nn.utils.clip_grad_norm_(other, 0.5)
    plain.step()
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("_served_by_references")
@pytest.mark.parametrize("kind", ALL)
def test_a_learning_rate_that_became_nan_is_refused_and_nothing_moves(kind: Any) -> None:
    params = parameters((4,), (5,))
    optimizer = kind([{"params": params[:1]}, {"params": params[1:]}])
    give_gradients(params)
    optimizer.param_groups[1]["lr"] = float("nan")
    before = [param.detach().clone() for param in params]
    with pytest.raises(UsageError, match=r"param_groups\[1\]: lr is nan"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (FusedAdam, {"lr": float("nan")}, "lr is nan"),
        (FusedAdam, {"lr": torch.tensor(-1.0)}, "lr is -1"),
        (FusedAdam, {"eps": -1e-8}, "eps is -1e-08"),
        (FusedAdam, {"weight_decay": float("inf")}, "weight_decay is inf"),
        (FusedAdam, {"betas": (1.0, 0.9)}, r"betas\[0\] is 1"),
        (FusedAdam, {"betas": (0.9, float("nan"))}, r"betas\[1\] is nan"),
        (FusedAdam, {"amsgrad": True}, "amsgrad is not supported by FusedAdam"),
        (
            FusedAdam,
            {"bias_correction": (0.9, 0.999)},
            "bias_correction is .*expected True or False",
        ),
        (FusedLion, {"lr": float("nan")}, "lr is nan"),
        (FusedLion, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1"),
        (FusedLion, {"weight_decay": -1.0}, "weight_decay is -1"),
        (FusedLion, {"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        (FusedLamb, {"eps": float("inf")}, "eps is inf"),
        (FusedLamb, {"min_coeff": -1.0}, "min_coeff is -1"),
        (FusedLamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff is 2.0, more than max_coeff"),
        (FusedLamb, {"amsgrad": True}, "amsgrad is not supported by FusedLamb"),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused_by_name(
    kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        kind(parameters((3,)), **options)
    if "max_grad_norm" in options:
        return  # no group has one of its own
    optimizer = kind(parameters((3,)))
    with pytest.raises(UsageError, match=message):
        optimizer.add_param_group({"params": parameters((4,)), **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", ALL)
def test_other_parameters_and_sparse_gradients_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(UsageError, match=rf"\['params'\]\[1\] is on meta: {kind.OWNER} steps"):
        kind([*parameters((3,)), torch.zeros(3, device="meta", requires_grad=True)])
    with pytest.raises(UsageError, match=r"weight \(.*\) has dtype torch\.float64"):
        kind([("weight", torch.zeros(3, dtype=torch.float64, requires_grad=True))])
    params = parameters((4,), (10, 3))
    before = params[0].detach().clone()
    optimizer = kind([{"params": params[:1]}, {"params": params[1:]}])
    give_gradients(params)
    params[1].grad = torch.zeros(10, 3).to_sparse()
    with pytest.raises(UsageError, match=r"param_groups\[1\]\['params'\]\[0\] is sparse"):
        optimizer.step()
    assert torch.equal(params[0], before)


# State dicts


@pytest.mark.usefixtures("_served_by_references")
@pytest.mark.parametrize("kind", ALL)
def test_training_goes_on_from_a_checkpoint_with_fp32_states(kind: Any) -> None:
    mine, other = twins((40,), (3, 5), dtype=BF16)
    ours = stepped(kind, mine, 3, master_weights=True)
    stepped(kind, other, 3, master_weights=True)
    resumed = kind(other, master_weights=True)
    resumed.load_state_dict(through_a_file(ours.state_dict()))
    for state in resumed.state.values():
        assert {value.dtype for value in state.values()} == {F32}
    for step in range(3, 6):
        give_gradients(mine, other, seed=step)
        ours.step()
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.usefixtures("_served_by_references")
@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("kind", ALL)
def test_a_state_dict_of_deepspeeds_is_taken(kind: Any, in_group: bool) -> None:
    params = parameters((4,))
    group = {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.0, "params": [0]}
    if kind is FusedLamb:
        group |= {
            "bias_correction": True, "eps": 1e-8, "max_grad_norm": 0.0, "max_coeff": 5.0,
            "min_coeff": 0.1,
        }  # fmt: skip
    if kind is FusedAdam:
        group |= {"bias_correction": True, "eps": 1e-8}
    state = {name: torch.ones(4) for name in kind.STATES}
    (group if in_group else state)["step"] = 7
    optimizer = kind(params)
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    give_gradients(params)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 8
    assert optimizer.param_groups[0]["lr"] == 0.5


# How states are kept


@pytest.mark.usefixtures("_served_by_references")
def test_small_states_share_memory_and_versions_and_large_ones_do_not() -> None:
    params = parameters((40,), (3, 5), (70_000,))
    optimizer = stepped(FusedAdam, params, 1)
    small = [optimizer.state[param]["exp_avg"] for param in params[:2]]
    large = optimizer.state[params[2]]["exp_avg"]
    assert small[0]._base is small[1]._base is not None
    assert large._base is None
    assert all(state.data_ptr() % 256 == small[0].data_ptr() % 256 for state in small)
    assert [state.shape for state in small] == [(40,), (3, 5)]


@pytest.mark.usefixtures("_served_by_references")
@pytest.mark.parametrize("kind", ALL)
def test_a_deep_copy_steps_on_its_own(kind: Any) -> None:
    params = parameters((5,), (6,))
    optimizer = stepped(kind, params, 3)
    other = copy.deepcopy(optimizer)
    theirs: list[Tensor] = other.param_groups[0]["params"]
    before = [param.detach().clone() for param in params]
    give_gradients(theirs)
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert not torch.equal(theirs[0], before[0])


class Refusing:
    """Lamb's reference, and plans that no gradients fit."""

    fused_lamb_ = staticmethod(references("fused_lamb").fused_lamb_)

    @staticmethod
    def fused_lamb_keep(*_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.zeros(1)

    @staticmethod
    def fused_lamb_forget(*_: Any) -> None:
        pass

    @staticmethod
    def fused_lamb_kept_(*_: Any, **__: Any) -> int:
        return Status.LAYOUT


def test_coefficients_are_those_of_the_parameters_that_were_stepped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FusedLamb, "_ops", {"cpu": Refusing})
    monkeypatch.setattr(FusedLamb, "KEPT_ON", ("cpu",))
    params = parameters((4,), (5,), (6,))
    optimizer = FusedLamb(params)
    for step in range(4):
        give_gradients(params, seed=step)
        if step == 3:
            params[0].grad = None
        optimizer.step()
    given = [param for param, _ in optimizer.coefficients()]
    assert all(a is b for a, b in zip(given, params[1:], strict=True))
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 4, 4]


# The CUDA libraries


@pytest.mark.parametrize("op", ["fused_lion", pytest.param("fused_lamb", marks=pytest.mark.full)])
def test_the_cuda_library_loads_on_a_torch_without_cuda(op: str) -> None:
    builder = opkiln.get_builder(op, backend="cuda", archs="9.0a")
    try:
        builder.jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"there is no nvcc that fits: {error.what}")
    for function in ("_", "_keep", "_kept_"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"opkiln::{op}{function}", "CUDA")
    library = wanted.artifact(builder.op()).path
    assert not [name for name in elf.read(library).needed if "cuda" in name]
    assert fatbin.images(library) == ("sm_90a",)
