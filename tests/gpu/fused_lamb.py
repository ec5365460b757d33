"""fused_lamb on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/fused_lamb.py [--only WORD]

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

from adam_oracle import BF16, DTYPES, F16, F32, clone
from checks import Skipped, assert_equal, assert_same, give_gradients, main, parameters, refusal
from fused_lamb_oracle import HYPER, assert_step, coefficients, oracle
from fused_lamb_oracle import tensors as host_tensors

import opkiln
from opkiln.optim import FusedLamb

SIZES = (0, 1, 7, 511, 512, 513, 4095, 1_000_003)


def native() -> Any:
    return opkiln.get_builder("fused_lamb").jit_load()


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
    for changes in (
        {}, {"weight_decay": 0.0}, {"bias_correction": False}, {"eps_inside_sqrt": True},
        {"beta1": 0.0}, {"beta2": 0.0}, {"maximize": True}, {"min_coeff": 0.0, "max_coeff": 1e9},
        {"min_coeff": 3.0, "max_coeff": 3.0},
    ):  # fmt: skip
        assert_step(native(), tensors((33, 5000)), **changes)


def check_sums_of_a_tensor_among_others_are_its_own() -> None:
    assert_step(native(), tensors((5, 700_003, 5000, 1, 3_000_000, 0, 512, 263_000)))
    assert_step(native(), tensors(tuple(1 + 977 * i % 20_000 for i in range(800))))


def check_fp32_stays_within_1e_6_of_float64_after_100_steps() -> str:
    params, _, exp_avgs, exp_avg_sqs, _, steps = tensors((100_003,), steps=(0.0,))
    exp_avgs[0].zero_()
    exp_avg_sqs[0].zero_()
    exact = [t[0].double() for t in (params, exp_avgs, exp_avg_sqs)]
    generator = torch.Generator().manual_seed(1)
    hyper, out = {**HYPER, "lr": 1e-3}, torch.ones(1, device="cuda")
    for step in range(1, 101):
        grad = torch.randn(100_003, generator=generator).cuda()
        native().fused_lamb_(params, [grad], exp_avgs, exp_avg_sqs, [], steps, out, **hyper)
        *exact, _ = oracle(exact[0], grad, exact[1], exact[2], {**hyper, "step": step})
    worst = max(
        float((got[0].double() - value).norm() / value.norm())
        for got, value in zip((params, exp_avgs, exp_avg_sqs), exact, strict=True)
    )
    assert worst <= 1e-6, worst
    return f"{worst:.1e}"


def check_the_same_input_gives_the_same_bits() -> None:
    runs = [tensors((5, 3_000_000, 70_001)) for _ in range(2)]
    outs = []
    for lists in runs:
        out = coefficients(lists)
        native().fused_lamb_(*lists, out, **HYPER)
        outs.append(out)
    assert torch.equal(*outs)
    assert_equal(*runs)


def check_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not() -> None:
    before = tensors((20_000,), BF16, F16, masters=True)
    for shifted in range(6):
        for offset, size in ((1, 17), (2, 64), (3, 10_000)):
            whole = clone(before)
            starts = [offset if shifted in (row, 5) else 8 for row in range(5)]
            parts = [
                [t[start : start + size] for t in row]
                for row, start in zip(whole, starts, strict=False)
            ]
            assert_step(native(), [*parts, whole[5]])
            for row, old, start in zip(whole, before, starts, strict=False):
                assert torch.equal(row[0][:start], old[0][:start])
                assert torch.equal(row[0][start + size :], old[0][start + size :])


def check_nothing_changes_where_a_gradient_is_not_finite() -> None:
    lists = tensors((33, 5000), BF16, BF16, masters=True)
    lists[1][1][7] = math.inf
    before, out = clone(lists), coefficients(lists)
    native().fused_lamb_(*lists, out, **HYPER, found_inf=torch.tensor([1.0], device="cuda"))
    for i in (0, 2, 3, 4, 5):
        assert_equal([lists[i]], [before[i]])
    assert out.tolist() == [7.0, 7.0]


def check_wrong_tensors_are_refused_by_name() -> None:
    lists = tensors((6, 6))
    assert "coefficients is not on cuda:0" in refusal(
        lambda: native().fused_lamb_(*lists, torch.ones(2), **HYPER)
    )
    lists[2][1] = lists[2][1].cpu()
    assert "exp_avgs[1] is not on cuda:0" in refusal(
        lambda: native().fused_lamb_(*lists, coefficients(lists), **HYPER)
    )


def check_kept_and_captured_steps_are_those_on_the_cpu() -> None:
    shapes = [(1 + 977 * i % 3000,) for i in range(300)]
    mine, other = parameters(*shapes), parameters(*shapes, device="cpu")
    rate = torch.tensor(1e-2, device="cuda")
    ours, theirs = (
        FusedLamb(params, lr=lr, weight_decay=0.1) for params, lr in ((mine, rate), (other, 1e-2))
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
        for (_, a), (_, b) in zip(ours.coefficients(), theirs.coefficients(), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=0)
    assert ours._plans is not None
    assert ours._plans.of_group[0] is not None, "it was not planned"
    assert_same([param.detach().cpu() for param in mine], other, rtol=1e-4)
    assert {int(state["step"]) for state in ours.state.values()} == {6}


def check_the_halves_of_a_step_are_the_step() -> str:
    """Of tensors in parts, whose sums of squares are added up between the halves."""
    first = {name: HYPER[name] for name in HYPER if name not in ("lr", "min_coeff", "max_coeff")}
    second = {name: HYPER[name] for name in HYPER if name != "maximize"}
    worst = 0.0
    for param, masters in ((F32, False), (BF16, False), (BF16, True)):
        whole = tensors((0, 5, 3001, 1_530_000), param, BF16, masters)
        parts = [
            [part.clone() for t in row for part in (t[:3], t[3:])] for row in whole[:5]
        ] + clone(whole[5:])
        ratios, of_parts = coefficients(whole), coefficients(parts)
        native().fused_lamb_(*whole, ratios, **HYPER)
        squares = torch.full((8, 2), math.nan, dtype=torch.float64, device="cuda")
        native().fused_lamb_average_(*parts, squares, **first)
        assert int(parts[5][0]) == 2, "the first half counts no step"
        sums = squares.view(4, 2, 2).sum(1, keepdim=True).expand(4, 2, 2).reshape(8, 2)
        native().fused_lamb_move_(*parts, sums.contiguous(), of_parts, **second)
        assert int(parts[5][0]) == 3
        assert torch.equal(*of_parts.view(4, 2).unbind(1))
        off = ((of_parts.view(4, 2)[:, 0] - ratios) / ratios).abs().max()
        worst = max(worst, float(off))
        assert worst <= 1e-6, worst
        for row, expected in zip(parts[:5], whole[:5], strict=True):
            for i, tensor in enumerate(expected):
                got = torch.cat(row[2 * i : 2 * i + 2])
                unit = torch.finfo(tensor.dtype).eps
                torch.testing.assert_close(got, tensor, rtol=unit, atol=1e-8)
    return f"coefficients within {worst:.1e}"


def check_dtensors_are_stepped_as_whole_tensors_are() -> str:
    """On a mesh of this process alone: the halves, with a collective between them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if not dist.is_gloo_available():
        raise Skipped("this torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        whole = parameters((300, 400), (7,), (1, 5))
        sharded = [
            distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
            for param in whole
        ]
        theirs, ours = (
            FusedLamb(params, lr=0.01, max_grad_norm=0.5) for params in (whole, sharded)
        )
        for step in range(4):
            give_gradients(whole, seed=step)
            for param, other in zip(sharded, whole, strict=True):
                param.grad = distribute_tensor(other.grad, mesh, [Shard(0)], src_data_rank=None)
            theirs.step()
            ours.step()
        assert_same([param.to_local() for param in sharded], whole, rtol=1e-6)
        for (_, one), (_, other) in zip(ours.coefficients(), theirs.coefficients(), strict=True):
            assert abs(float(one / other) - 1) <= 1e-6
    finally:
        dist.destroy_process_group()
    return "3 tensors, 4 steps"


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
