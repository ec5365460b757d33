"""In a fresh process: the first use of each op of the catalogue is in a compiled function.

Prints a line of JSON for each case: what failed, the graph's calls, and how many graphs there were
after the first call and after the last.

    python compiled_first_use.py BACKEND EMPTY CASE...

EMPTY is a directory: packbits is compiled into a store there, which has nothing yet.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch._dynamo

import opkiln
from opkiln.builder.registry import get_builder


def quantizer(x: torch.Tensor) -> Any:
    q = opkiln.quant.quantize(x, group_size=64)
    return opkiln.quant.dequantize(q), opkiln.quant.fake_quantize(x, bits=4, group_size=64)


def fp_quantizer(x: torch.Tensor) -> Any:
    quantizer = opkiln.quant.FPQuantizer("e4m3", group_size=64)
    return quantizer.dequantize(quantizer.quantize(x))


def packbits(x: torch.Tensor) -> Any:
    return opkiln.quant.unpackbits(opkiln.quant.packbits(x), x.shape)


def utils(x: torch.Tensor) -> Any:
    flat = opkiln.utils.flatten([x, x + 1])
    first, second = torch.empty_like(x), torch.empty_like(x)
    opkiln.utils.unflatten_into(flat, [first, second])
    return first, second


def pin_memory(x: torch.Tensor) -> Any:
    ops = get_builder("pin_memory", backend="cpu").load()
    memory = x.to(torch.uint8)
    ops.lock_pages_(memory, x)
    ops.unlock_pages_(memory, x)
    return memory


HYPER = {
    "cpu_adam": (1, 0.1, 0.9, 0.99, 1e-8, 0.0, True, True, False, 1.0),
    "cpu_adagrad": (1, 0.1, 0.0, 1e-8, 0.0, False, 1.0),
    "cpu_lion": (0.1, 0.9, 0.99, 0.0, False, 1.0),
    "fused_adam": (0.1, 0.9, 0.99, 1e-8, 0.0, True, True, False),
    "fused_lamb": (0.1, 0.9, 0.99, 1e-8, 0.0, False, True, False, 0.01, 10.0),
    "fused_lion": (0.1, 0.9, 0.99, 0.0, False),
}
STATES = {"cpu_adagrad": 1, "cpu_lion": 1, "fused_lion": 1}


def optimizer_op(name: str) -> Callable[[torch.Tensor], Any]:
    """The op under an optimizer, called by itself."""

    def call(x: torch.Tensor) -> Any:
        param, grad = x.clone(), x * 0.5
        states = [torch.zeros_like(x) for _ in range(STATES.get(name, 2))]
        rest: list[Any] = [[]] if name.startswith("cpu") else [[], [torch.zeros(())]]
        if name == "fused_lamb":
            rest.append(torch.zeros(1))  # receives the coefficients
        ops = get_builder(name, backend="cpu").load()
        step = getattr(ops, f"{name}_")
        step([param], [grad], *([state] for state in states), *rest, *HYPER[name])
        return param, *states

    return call


CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f.__name__: f for f in (quantizer, fp_quantizer, packbits, utils, pin_memory)},
    **{name: optimizer_op(name) for name in HYPER},
}
OPTIMIZERS = ("CPUAdagrad", "CPUAdam", "CPULion", "FusedAdam", "FusedLamb", "FusedLion")


class Recorder:
    """A backend that counts its graphs and keeps what they call."""

    def __init__(self, backend: str) -> None:
        self.backend, self.graphs, self.calls = backend, 0, set[str]()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        self.calls |= {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    return all(map(equal, ours, theirs))


def use(function: Callable[[torch.Tensor], Any], backend: str) -> dict[str, Any]:
    recorder = Recorder(backend)
    x = torch.arange(256.0) - 100
    compiled = torch.compile(function, fullgraph=True, backend=recorder)
    found = compiled(x)
    first = recorder.graphs
    again = compiled(x + 1)
    right = equal(found, function(x)) and equal(again, function(x + 1))
    return {"right": right, "first": first, "last": recorder.graphs, "calls": [*recorder.calls]}


def step(name: str, form: str, backend: str) -> dict[str, Any]:
    """Four compiled steps with a learning rate that changes, beside four that are not compiled."""
    kind = getattr(opkiln.optim, name)
    ours, theirs = ([torch.nn.Parameter(torch.arange(8.0) - i) for i in range(3)] for _ in "ab")
    mine, other = kind(ours, lr=0.1), kind(theirs, lr=0.1)
    recorder = Recorder(backend)

    def whole() -> None:
        mine.step()

    function = whole if form == "function" else mine.step
    compiled = torch.compile(function, fullgraph=True, backend=recorder)
    graphs = []
    for number in range(4):
        for params in (ours, theirs):
            for i, param in enumerate(params):
                param.grad = torch.full_like(param, 0.1 * (i + number + 1))
        compiled()
        other.step()
        graphs.append(recorder.graphs)
        for optimizer in (mine, other):
            optimizer.param_groups[0]["lr"] *= 0.9
    right = equal(ours, theirs) and equal(
        [list(s.values())[1:] for s in mine.state_dict()["state"].values()],
        [list(s.values())[1:] for s in other.state_dict()["state"].values()],
    )
    return {"right": right, "first": graphs[0], "last": graphs[-1], "calls": [*recorder.calls]}


def main(backend: str, empty: str, names: list[str]) -> None:
    warnings.simplefilter("error", opkiln.errors.FallbackWarning)
    for name in names:
        torch._dynamo.reset()
        store = {"OPKILN_CACHE_DIR": empty} if name == "packbits" else {}
        try:
            case = CASES.get(name)
            with mock.patch.dict(os.environ, store):
                answer = use(case, backend) if case else step(*name.split("."), backend)
        except Exception as error:  # what the test shows
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": name, **answer}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
