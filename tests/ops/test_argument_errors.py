"""Wrong arguments raise errors of opkiln that are also of the class that torch raises for them."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opkiln import optim, quant, utils
from opkiln.errors import ArgumentError, ArgumentTypeError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

WRONG: list[dict[str, Any]] = [
    {"lr": "1e-3"},
    {"lr": -1},
    {"lr": None},
    {"eps": -1.0},
    {"eps": "1e-8"},
    {"weight_decay": -0.1},
    {"weight_decay": "0.1"},
    {"betas": (1.5, 0.9)},
    {"betas": (0.9, -0.1)},
    {"betas": ("0.9", 0.999)},
    {"betas": 0.9},
    {"betas": "ab"},
]
LACKS = {"CPUAdagrad": {"betas"}, "CPULion": {"eps"}, "FusedLion": {"eps"}}


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 (which one is what is asked)
        call()
    return caught.value


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("name", optim.__all__)
def test_optimizer_refuses_an_argument_with_the_class_of_error_that_torch_raises(
    name: str, wrong: dict[str, Any]
) -> None:
    (argument,) = wrong
    if argument in LACKS.get(name, ()):
        pytest.skip(f"{name} has no {argument}")
    theirs = raised(lambda: torch.optim.Adam(params(), **wrong))
    ours = raised(lambda: getattr(optim, name)(params(), **wrong))
    assert isinstance(theirs, ValueError | TypeError)
    assert isinstance(ours, ValueError if isinstance(theirs, ValueError) else TypeError), ours
    assert isinstance(ours, UsageError)
    assert ours.what.startswith(argument)


@pytest.mark.parametrize("name", optim.__all__)
def test_optimizer_refuses_a_group_with_a_learning_rate_in_quotes(name: str) -> None:
    optimizer = getattr(optim, name)(params())
    with pytest.raises(TypeError, match="lr is '1e-3', expected a number"):
        optimizer.add_param_group({"params": params(), "lr": "1e-3"})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("lr", [1, 0.1, torch.tensor(0.1), torch.tensor([0.1])], ids=str)
def test_optimizer_takes_every_kind_of_number(lr: Any) -> None:
    assert optim.CPUAdam(params(), lr=lr).param_groups[0]["lr"] is lr


@pytest.mark.parametrize(
    "call",
    [
        lambda: quant.quantize(torch.ones(64, dtype=torch.int32)),
        lambda: quant.fake_quantize(torch.ones(64, dtype=torch.float64)),
        lambda: quant.packbits(torch.ones(8, dtype=torch.int8)),
        lambda: quant.unpackbits(torch.ones(1), 8),
        lambda: quant.FPQuantizer().quantize(torch.ones(64, dtype=torch.int32)),
        lambda: utils.flatten([torch.ones(1), torch.ones(1, dtype=torch.int32)]),
        lambda: optim.CPUAdam([torch.ones(3, dtype=torch.float64)]),
    ],
)
def test_wrong_dtype_is_a_type_error_and_a_usage_error(call: Callable[[], Any]) -> None:
    error = raised(call)
    assert isinstance(error, ArgumentTypeError)
    assert isinstance(error, TypeError)
    assert isinstance(error, UsageError)


@pytest.mark.parametrize(
    "call",
    [
        lambda: quant.quantize(torch.ones(64), bits=3),
        lambda: quant.quantize(torch.ones(64), group_size=7),
        lambda: quant.FPQuantizer("e9m9"),
        lambda: utils.flatten([]),
    ],
)
def test_value_that_cannot_be_is_a_value_error_and_a_usage_error(call: Callable[[], Any]) -> None:
    error = raised(call)
    assert isinstance(error, ArgumentError)
    assert isinstance(error, ValueError)
    assert not isinstance(error, TypeError)


@pytest.mark.parametrize("kind", [ArgumentError, ArgumentTypeError])
def test_argument_error_survives_a_pickle(kind: type[UsageError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", why="why", hint="hint")))
    assert (type(error), str(error)) == (kind, "what\n  why\nhint: hint")
