"""State dicts of other optimizers: taken where the rule is the same, otherwise refused before
anything changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from opkiln import optim
from opkiln.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::opkiln.errors.FallbackWarning")

TORCHS: dict[str, dict[str, Any]] = {
    "Adam": {}, "AdamW": {}, "RAdam": {}, "NAdam": {}, "Adamax": {}, "Adagrad": {}, "RMSprop": {},
    "Adadelta": {}, "ASGD": {}, "Rprop": {}, "SGD": {"lr": 0.1, "momentum": 0.9},
}  # fmt: skip
SOURCES = (*TORCHS, *optim.__all__)
# The averages of Adam are the same numbers whoever keeps them: what is made of them is the rule's.
ADAMS = {"Adam", "AdamW", "RAdam", "NAdam", "CPUAdam", "FusedAdam", "FusedLamb"}
LIONS = {"CPULion", "FusedLion"}
ADAGRADS = {"Adagrad", "CPUAdagrad"}
TAKEN = {
    "CPUAdam": ADAMS, "FusedAdam": ADAMS, "FusedLamb": ADAMS, "CPULion": LIONS,
    "FusedLion": LIONS, "CPUAdagrad": ADAGRADS,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _by_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_MODE", "cached")


def stepped(name: str, steps: int, dtype: torch.dtype = torch.float32) -> Any:
    kind = getattr(torch.optim if name in TORCHS else optim, name)
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=generator).to(dtype).requires_grad_() for n in (4, 3)]
    optimizer = kind(params, **TORCHS.get(name, {}))
    for _ in range(steps):
        step(optimizer, generator)
    return optimizer


def step(optimizer: Any, generator: torch.Generator) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def snapshot(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def assert_unchanged(optimizer: Any, before: Any) -> None:
    now = optimizer.state_dict()
    assert now["param_groups"] == before["param_groups"]
    assert now["state"].keys() == before["state"].keys()
    for key, state in now["state"].items():
        assert state.keys() == before["state"][key].keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(before["state"][key][name]))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", optim.__all__)
def test_states_of_the_same_rule_are_taken_and_others_refused(name: str, source: str) -> None:
    optimizer, saved = stepped(name, 1), stepped(source, 3).state_dict()
    before = snapshot(optimizer)
    if source not in TAKEN[name]:
        with pytest.raises(UsageError, match=rf"not .* whose states {name} can take"):
            optimizer.load_state_dict(saved)
        assert_unchanged(optimizer, before)
        step(optimizer, torch.Generator())
        return
    optimizer.load_state_dict(saved)
    for key, param in enumerate(optimizer.param_groups[0]["params"]):
        state = optimizer.state[param]
        assert float(state["step"]) == 3
        assert {name for name in state if name != "step"} - {"mu_product"} == set(optimizer.STATES)
        for entry in optimizer.STATES:
            assert torch.equal(state[entry], saved["state"][key][entry])
    step(optimizer, torch.Generator())


@pytest.mark.parametrize("name", optim.__all__)
def test_fp32_states_of_a_narrow_parameter_arrive_as_they_were(name: str) -> None:
    """torch's own load_state_dict would have rounded them to bf16."""
    wide = stepped(name, 3).state_dict()
    narrow = stepped(name, 1, torch.bfloat16)
    narrow.load_state_dict(wide)
    for key, param in enumerate(narrow.param_groups[0]["params"]):
        for entry in narrow.STATES:
            assert torch.equal(narrow.state[param][entry], wide["state"][key][entry])


def _without(entry: str) -> Any:
    return lambda saved: saved["state"][1].pop(entry)


def _with(entry: str, value: Any) -> Any:
    return lambda saved: saved["state"][1].update({entry: value})


@pytest.mark.parametrize("name", ["CPUAdam", "FusedAdam", "FusedLamb"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("exp_avg_sq"), r"state\[1\]: missing exp_avg_sq; found step, exp_avg"),
        (_without("step"), r"state\[1\]: missing step"),
        (_with("step", torch.tensor(-1.0)), r"state\[1\]: step is .*expected a whole number"),
        (_with("step", torch.tensor(1.5)), r"state\[1\]: step is .*expected a whole number"),
        (_with("step", torch.ones(2)), r"state\[1\]: step is .*expected a whole number"),
        (_with("exp_avg", torch.ones(4)), r"state\[1\]: exp_avg has shape \[4\], its .* has \[3\]"),
        (_with("exp_avg", None), r"state\[1\]: exp_avg is None, expected a tensor"),
        (_with("momentum_buffer", torch.ones(3)), r"state\[1\]: unexpected momentum_buffer"),
        (
            lambda saved: saved["param_groups"][0].pop("betas"),
            r"param_groups\[0\]: missing betas; found lr",
        ),
        (lambda saved: saved.pop("param_groups"), "expected the keys 'state' and 'param_groups'"),
        (dict.clear, "found nothing"),
    ],
)
def test_a_damaged_state_dict_is_refused_before_anything_changes(
    name: str, damage: Any, message: str
) -> None:
    optimizer, saved = stepped(name, 1), snapshot(stepped("AdamW", 3))
    before = snapshot(optimizer)
    damage(saved)
    with pytest.raises(UsageError, match=message):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("name", optim.__all__)
def test_a_models_state_dict_is_refused_by_name(name: str) -> None:
    optimizer = stepped(name, 1)
    model: dict[str, Tensor] = torch.nn.Linear(2, 2).state_dict()
    with pytest.raises(UsageError, match=f"{name} cannot load this state dict.*found 'weight'"):
        optimizer.load_state_dict(model)


@pytest.mark.parametrize("name", ["CPULion", "FusedLion"])
def test_an_unused_state_of_zeros_is_let_go(name: str) -> None:
    """DeepSpeed's CPULion has an exp_avg_sq, which it never writes to."""
    optimizer, saved = stepped(name, 1), snapshot(stepped(name, 3))
    for state in saved["state"].values():
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
    optimizer.load_state_dict(saved)
    for param in optimizer.param_groups[0]["params"]:
        assert set(optimizer.state[param]) == {"step", "exp_avg"}
