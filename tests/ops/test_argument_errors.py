"""Wrong arguments raise errors of opkiln that are also of the class that torch raises for them."""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from opkiln import optim, quant, utils
from opkiln.errors import ArgumentError, ArgumentTypeError, UsageError
from opkiln.nn import inference, sparse_attention
from opkiln.ops.evoformer_attn.functions import evoformer_attention
from opkiln.ops.sparse_attn.functions import sparse_attn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def _refused() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Ops with arguments that they refuse."""
    q = torch.randn(1, 2, 4, 3, 8)
    for given in (
        (q[0], q[0], q[0], None, None),
        (q, q[:, :1], q, None, None),
        (q, q, q.half(), None, None),
        (q, q, q, q, None),
        (q, q, q, None, torch.zeros(1, 1, 3, 4, 4).half()),
    ):
        yield evoformer_attention, (*given, 1.0)
    x = torch.randn(1, 2, 32, 16)
    seen = sparse_attention.Dense(16).plan(32).seen
    rules = (16, 1.0, False, 0, False)
    for rest in (
        (x[:, :1], x, seen, [], None, None, *rules),
        (x, x.half(), seen, [], None, None, *rules),
        (x, x, seen.expand(3, -1, -1).contiguous(), [], None, None, *rules),
        (x, x, seen, [], torch.zeros(1, 31), None, *rules),
        (x, x, seen, [], None, torch.zeros(1, 1, 32, 32), *rules),
        (x, x, seen, [], None, None, 16, 0.0, *rules[2:]),
    ):
        yield sparse_attn, (x, *rest)
    row, weight, scales = torch.randn(2, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    yield inference.rms_norm, (row, torch.ones(7))
    yield inference.rms_norm, (row, torch.ones(8).half())
    yield inference.post_layer_norm, (row, row[:1])
    yield inference.residual_add, (row.sum(), row)
    yield inference.moe_res_matmul, (row, torch.ones(3, 8), row)
    yield inference.int8_linear, (row, weight.float(), scales)
    yield inference.int8_linear, (row, weight[0], scales)
    yield inference.int8_linear, (row[:, :4], torch.ones(8, 2, dtype=torch.int8).T, scales)
    heads, table = torch.randn(2, 3, 4, 8), torch.randn(9, 4)
    yield inference.rotary, (heads, torch.zeros(3))
    yield inference.rotary, (heads, None, table[:, :3], table[:, :3])
    yield inference.rotary, (heads, None, table, table[1:])
    yield inference.rotary, (heads, None, None, None, 0, -1.0)
    yield inference.rotary_qk, (heads, heads.half())
    yield inference.softmax, (heads, torch.zeros(4, 8, dtype=torch.bool))


def test_native_version_and_reference_refuse_in_the_same_words() -> None:
    for op, given in _refused():
        assert op.load("cpu", dtype="float32")
        native = str(raised(partial(op, *given))).splitlines()[0]
        assert native == f"{op.__name__}: {raised(partial(op.reference, *given))}"
