"""In a fresh process: the ways to call one kernel, timed in turn. ``child_calls.py ROUNDS``."""

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from calls import FUNCTION, OVERLOAD, PLAIN, TRAINED, WAYS
from torch import Tensor

import opkiln

SOURCES = Path(__file__).parent / "sources"
CALLS = 2000  # in a round: some milliseconds


@opkiln.op(source=(SOURCES / "add_light.cpp").read_text(), namespace="opkiln_bench_calls")
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y"""
    return x + y


class AddBuilder(opkiln.OpBuilder):
    """The same kernel in an op that has no gradient."""

    NAME = "add_without_gradient"
    NAMESPACE = "opkiln_bench_plain"
    root = str(SOURCES)

    def sources(self) -> list[str]:
        return ["add_light.cpp"]


opkiln.library(AddBuilder).op(gradient=False)(add.reference)


def custom(name: str, plain: Callable[..., Tensor]) -> Any:
    """torch.library's own decorator around the kernel."""

    @torch.library.custom_op(f"opkiln_bench_calls::{name}", mutates_args=())
    def custom_add(x: Tensor, y: Tensor) -> Tensor:
        return plain(x, y)

    return custom_add


def ways() -> dict[str, Callable[[], object]]:
    """Each way as a function without arguments that makes CALLS calls."""
    x, y = torch.randn(8), torch.randn(8)
    trained = torch.randn(8, requires_grad=True)
    plain = AddBuilder().load().add
    untrained, trainable = custom("custom_add", plain), custom("trained_add", plain)
    trainable.register_autograd(lambda _, grad: (grad, grad))
    add(x, y)  # loads the library
    given: dict[str, tuple[Any, Tensor]] = {
        FUNCTION: (add, x),
        OVERLOAD: (torch.ops.opkiln_bench_calls.add.no_grad, x),
        PLAIN: (plain, x),
        TRAINED: (torch.ops.opkiln_bench_calls.add.default, x),
        "decorated function, gradient needed": (add, trained),
        "torch.library.custom_op": (untrained, x),
        "custom_op with register_autograd": (trainable, x),
        "torch.add": (torch.add, x),
    }
    for function, first in given.values():
        assert torch.equal(function(first, y), first + y)
    return {way: _calls(*given[way], y) for way in WAYS}


def _calls(function: Any, x: Tensor, y: Tensor) -> Callable[[], object]:
    def run() -> None:
        for _ in itertools.repeat(None, CALLS):
            function(x, y)

    return run


def main(rounds: int) -> None:
    """Time all of them in turn; the least of each, in nanoseconds a call."""
    torch.set_num_threads(1)
    found = ways()
    least = {way: {"cpu": float("inf"), "wall": float("inf")} for way in found}
    for _ in range(rounds):
        for way, run in found.items():
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            run()
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            least[way]["cpu"] = min(least[way]["cpu"], cpu / CALLS)
            least[way]["wall"] = min(least[way]["wall"], wall / CALLS)
    print("\nBENCH-ANSWER " + json.dumps(least), flush=True)


main(int(sys.argv[1]))
