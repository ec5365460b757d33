"""fused_lion on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/fused_lion.py [--only WORD]

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from adam_oracle import BF16, DTYPES, F16, F32, assert_stored, clone
from checks import Skipped, assert_equal, give_gradients, main, parameters, refusal
from fused_lion_oracle import HYPER, assert_step, oracle
from fused_lion_oracle import tensors as host_tensors

import opkiln
from opkiln.optim import FusedLion

SIZES = (0, 1, 7, 511, 512, 513, 4095, 1_000_003)


def native() -> Any:
    return opkiln.get_builder("fused_lion").jit_load()


def tensors(*args: Any, **kwargs: Any) -> list[list[Tensor]]:
    return [[t.cuda() for t in row] for row in host_tensors(*args, **kwargs)]


def check_every_mix_of_types_and_sizes_agrees_with_float64() -> str:
    mixes = [
        (param, grad, masters)
        for param in DTYPES
        for grad in DTYPES
        for masters in (False, True)
        if not (masters and param == F32)
    ]
    for param, grad, masters in mixes:
        assert_step(native(), tensors(SIZES, param, grad, masters))
    return f"{len(mixes)} mixes"


def check_every_mode_agrees_with_float64() -> None:
    for changes in ({}, {"weight_decay": 0.0}, {"beta1": 0.0}, {"beta2": 0.0}, {"maximize": True}):
        assert_step(native(), tensors((33, 5000)), **changes)


def check_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not() -> None:
    before = tensors((20_000,), BF16, F16, masters=True)
    for shifted in range(5):
        for offset, size in ((1, 17), (2, 64), (3, 10_000)):
            whole = clone(before)
            starts = [offset if shifted in (row, 4) else 8 for row in range(4)]
            parts = [
                [t[start : start + size] for t in row]
                for row, start in zip(whole, starts, strict=False)
            ]
            assert_step(native(), [*parts, whole[4]])
            for row, old, start in zip(whole, before, starts, strict=False):
                assert torch.equal(row[0][:start], old[0][:start])
                assert torch.equal(row[0][start + size :], old[0][start + size :])


def check_more_than_2_to_the_31_elements() -> str:
    count = 2**31 + 3
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    param = torch.full((count,), 0.5, dtype=BF16, device="cuda")
    grad = torch.full((count,), 0.25, dtype=BF16, device="cuda")
    m = torch.zeros(count, device="cuda")
    end = slice(2**31 - 500, count)
    exact = oracle(param[end], grad[end], m[end], HYPER)
    native().fused_lion_([param], [grad], [m], [], [torch.zeros((), device="cuda")], **HYPER)
    assert_stored(param[end], exact[0])
    assert_stored(m[end], exact[1])
    assert bool((m == m[0]).all()), "an element was left out, or stepped twice"
    return f"{count} elements"


def check_nothing_changes_where_a_gradient_is_not_finite() -> None:
    lists = tensors((33, 5000), BF16, BF16, masters=True)
    lists[1][1][7] = math.inf
    before = clone(lists)
    native().fused_lion_(*lists, **HYPER, found_inf=torch.tensor([1.0], device="cuda"))
    assert_equal(lists, before)


def check_wrong_tensors_are_refused_by_name() -> None:
    lists = tensors((6, 6))
    lists[2][1] = lists[2][1].cpu()
    assert "exp_avgs[1] is not on cuda:0" in refusal(lambda: native().fused_lion_(*lists, **HYPER))


def check_kept_and_captured_steps_are_those_on_the_cpu() -> None:
    shapes = [(1 + 977 * i % 3000,) for i in range(300)]
    mine, other = parameters(*shapes), parameters(*shapes, device="cpu")
    rate = torch.tensor(1e-2, device="cuda")
    ours, theirs = (
        FusedLion(params, lr=lr, weight_decay=0.1) for params, lr in ((mine, rate), (other, 1e-2))
    )
    for step in range(6):
        if step < 4:
            for param in mine:
                param.grad = None  # fresh ones
        give_gradients(mine, other, seed=step)
        if step == 4:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ours.step()
        if step >= 4:
            graph.replay()
        else:
            ours.step()
        theirs.step()
    assert ours._plans is not None
    assert ours._plans.of_group[0] is not None, "it was not planned"
    close = [(a.detach().cpu() - b.detach()).abs() < 1e-5 for a, b in zip(mine, other, strict=True)]
    # A blend that is rounded to the other side of 0 moves the other way, on either.
    assert float(torch.cat(close).float().mean()) > 0.999
    assert {int(state["step"]) for state in ours.state.values()} == {6}


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
