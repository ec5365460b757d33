"""fused_adam on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/fused_adam.py [--only WORD]

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from adam_oracle import BF16, DTYPES, F16, F32, assert_stored, clone, oracle
from checks import Skipped, assert_equal, assert_same, give_gradients, main, parameters, refusal
from fused_oracle import HYPER, ROLES, assert_step
from fused_oracle import tensors as host_tensors

import opkiln
from opkiln.ops.optimizing.op_calls import Status
from opkiln.optim import FusedAdam

SIZES = (0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 1_000_003)


def native() -> Any:
    return opkiln.get_builder("fused_adam").jit_load()


def tensors(*args: Any, **kwargs: Any) -> list[list[Tensor]]:
    return [[t.cuda() for t in row] for row in host_tensors(*args, **kwargs)]


# Building


def check_it_builds_for_this_gpu_and_serves() -> str:
    began = time.perf_counter()
    builder = opkiln.get_builder("fused_adam")
    builder.jit_load()
    seconds = time.perf_counter() - began
    assert builder.backend == "cuda", builder.backend
    assert torch._C._dispatch_has_kernel_for_dispatch_key("opkiln::fused_adam_", "CUDA")
    return f"loaded in {seconds:.2f} s"


# Arithmetic


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
    for mode in range(16):
        adamw, maximize, correct, decay = (bool(mode >> bit & 1) for bit in range(4))
        assert_step(
            native(), tensors((33, 5000)), adamw_mode=adamw, maximize=maximize,
            bias_correction=correct, weight_decay=0.1 * decay,
        )  # fmt: skip


def check_numbers_at_their_limits_agree_with_float64() -> None:
    for changes in ({"beta1": 0.0}, {"beta2": 0.0}, {"eps": 0.1}, {"lr": 0.0}):
        for made in (0.0, 1e6):
            assert_step(native(), tensors((100,), steps=(made,)), **changes)


def check_fp32_stays_within_1e_6_of_float64_after_100_steps() -> str:
    worst = 0.0
    for adamw_mode in (True, False):
        params, _, exp_avgs, exp_avg_sqs, _, steps = tensors((100_003,), steps=(0.0,))
        exp_avgs[0].zero_()
        exp_avg_sqs[0].zero_()
        exact = tuple(t[0].double() for t in (params, exp_avgs, exp_avg_sqs))
        generator = torch.Generator().manual_seed(1)
        hyper = {**HYPER, "lr": 1e-3, "adamw_mode": adamw_mode}
        for step in range(1, 101):
            grad = torch.randn(100_003, generator=generator).cuda()
            native().fused_adam_(params, [grad], exp_avgs, exp_avg_sqs, [], steps, **hyper)
            numbers = {**hyper, "step": step, "grad_scale": 1.0}
            exact = oracle(exact[0], grad, exact[1], exact[2], numbers)
        for got, value in zip((params, exp_avgs, exp_avg_sqs), exact, strict=True):
            worst = max(worst, float((got[0].double() - value).norm() / value.norm()))
    assert worst <= 1e-6, worst
    return f"{worst:.1e}"


def check_views_at_odd_addresses_are_stepped_and_their_neighbours_are_not() -> None:
    for param in (F32, BF16):
        before = tensors((20_000,), param, F16, masters=param != F32)
        for shifted in range(6):  # each of the five lists, and then all
            for offset, size in ((1, 17), (2, 64), (3, 10_000), (4, 10_000)):
                whole = clone(before)
                starts = [offset if shifted in (row, 5) else 8 for row in range(5)]
                part = [
                    [t[start : start + size] for t in row]
                    for row, start in zip(whole, starts, strict=False)
                ]
                assert_step(native(), [*part, whole[5]])
                for row, start in enumerate(starts):
                    for tensor, old in zip(whole[row], before[row], strict=True):
                        assert torch.equal(tensor[:start], old[:start])
                        assert torch.equal(tensor[start + size :], old[start + size :])


def check_many_tensors_are_stepped_as_one_by_one() -> None:
    sizes = tuple(1 + 977 * i % 20_000 for i in range(800))
    together = tensors(sizes, BF16, BF16, masters=True)
    apart = clone(together)
    native().fused_adam_(*together, **HYPER)
    for i in range(len(sizes)):
        step = [apart[5][0].clone()]
        native().fused_adam_(*([row[i]] for row in apart[:5]), step, **HYPER)
    assert_equal(together[:5], apart[:5])
    assert together[5][0] == 3


def check_more_tensors_than_one_launch_takes_with_a_count_for_each() -> None:
    sizes = tuple(1 + i % 300 for i in range(1100))
    assert_step(native(), tensors(sizes, steps=tuple(float(i % 7) for i in range(1100))))


def check_ten_thousand_views_are_stepped_as_the_whole() -> None:
    whole = tensors((257 * 10_000,))
    flat = clone(whole)
    views = [[view for t in row for view in t.split(257)] for row in whole[:4]]
    native().fused_adam_(*views, [], whole[5], **HYPER)
    native().fused_adam_(*flat, **HYPER)
    assert_equal(whole, flat)


def check_more_than_2_to_the_31_elements() -> str:
    count = 2**31 + 3
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    param = torch.full((count,), 0.5, dtype=BF16, device="cuda")
    grad = torch.full((count,), 0.25, dtype=BF16, device="cuda")
    m, v = (torch.zeros(count, device="cuda") for _ in range(2))
    ends = [slice(0, 1000), slice(2**31 - 500, 2**31 + 3)]
    steps = [torch.zeros((), device="cuda")]
    numbers = {**HYPER, "step": 1, "grad_scale": 1.0}
    exact = [oracle(param[end], grad[end], m[end], v[end], numbers) for end in ends]
    native().fused_adam_([param], [grad], [m], [v], [], steps, **HYPER)
    for end, values in zip(ends, exact, strict=True):
        for tensor, value in zip((param, m, v), values, strict=True):
            assert_stored(tensor[end], value)
    assert bool((param == param[0]).all()), "an element was left out, or stepped twice"
    return f"{count} elements"


def check_nan_and_infinity_travel_as_in_torch() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    for dtype in DTYPES:
        param, grad = (
            t.to("cuda", dtype) for t in (odd.repeat_interleave(5), odd.repeat(5))
        )  # fmt: skip
        theirs = torch.nn.Parameter(param.float())
        theirs.grad = grad.float()
        torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, foreach=False).step()
        zeros = [[torch.zeros(25, device="cuda")] for _ in range(2)]
        steps = [torch.zeros((), device="cuda")]
        hyper = {**HYPER, "beta2": 0.999}
        native().fused_adam_([param], [grad], *zeros, [], steps, **hyper)
        torch.testing.assert_close(param, theirs.detach().to(dtype), equal_nan=True)


# What only the device knows


def check_a_learning_rate_and_a_scale_in_tensors() -> None:
    for dtype in (F32, torch.float64):
        rate = torch.full((), 0.003, dtype=dtype, device="cuda")
        scale = torch.tensor([1024.0], device="cuda")
        lists = tensors((33, 5000))
        lists[1] = [grad * 1024 for grad in lists[1]]
        assert_step(native(), lists, {"lr_tensor": rate, "grad_scale": scale}, lr=math.nan)


def check_nothing_changes_where_a_gradient_is_not_finite() -> None:
    for steps in ((2.0,), (2.0, 3.0)):
        lists = tensors((33, 5000), BF16, BF16, masters=True, steps=steps)
        lists[1][1][7], lists[1][0][3] = math.inf, math.nan
        before = clone(lists)
        native().fused_adam_(*lists, **HYPER, found_inf=torch.tensor([1.0], device="cuda"))
        for i in (0, 2, 3, 4, 5):
            assert_equal([lists[i]], [before[i]])
        lists[1][1][7], lists[1][0][3] = 0.0, 1.0
        assert_step(native(), lists, {"found_inf": torch.tensor([0.0], device="cuda")})


def check_a_grad_scaler_scales_skips_and_goes_on() -> None:
    mine, other = (parameters((300,), (17, 5)) for _ in range(2))
    ours, plain = FusedAdam(mine, lr=1e-2), FusedAdam(other, lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=100)
    scaler.scale(torch.zeros((), device="cuda"))  # makes its tensors
    for step in range(6):
        give_gradients(mine, seed=step, scale=1024.0 if step < 3 else 512.0)
        give_gradients(other, seed=step)
        if step == 2:
            mine[0].grad[1] = math.inf
        scaler.step(ours)
        scaler.update()
        if step != 2:
            plain.step()
    assert scaler.get_scale() == 512.0
    assert_same(mine, other)
    assert {int(state["step"]) for state in ours.state.values()} == {5}


# Streams, graphs, compilers


def check_it_runs_on_the_current_stream() -> None:
    lists = tensors((5000,))
    before = clone(lists)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    # A kernel that is loaded waits for the device: those that are needed below come before.
    native().fused_adam_(*tensors((8,)), **HYPER)
    lists[1][0].clone().mul_(2.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # about a second
        lists[1][0].mul_(2.0)
        native().fused_adam_(*lists, **HYPER)
        done.record()
    early = lists[0][0].clone()  # on the default stream, which does not wait for the other
    torch.cuda.default_stream().synchronize()
    assert not done.query(), "the side stream was not busy long enough to tell"
    assert torch.equal(early, before[0][0]), "the step did not wait for its stream"
    side.synchronize()
    before[1][0].mul_(2.0)
    native().fused_adam_(*before, **HYPER)
    assert_equal(lists, before)


def check_a_captured_step_follows_rate_gradients_and_found_inf() -> None:
    mine, other = (parameters((4099,), (33, 7), (1,), dtype=F32) for _ in range(2))
    rate = torch.tensor(1e-2, device="cuda")
    ours = FusedAdam(mine, lr=rate, weight_decay=0.1)
    theirs = torch.optim.AdamW(other, lr=1e-2, weight_decay=0.1)
    found, scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    give_gradients(mine, other)
    ours.step()
    theirs.step()
    ours.found_inf, ours.grad_scale = found, scale
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for step in range(1, 30):
        value = 1e-2 / step
        skip = step % 5 == 0
        rate.fill_(value)
        scale.fill_(2.0**step)
        found.fill_(float(skip))
        give_gradients(mine, seed=step, scale=2.0**step)
        give_gradients(other, seed=step)
        if skip:
            mine[0].grad[3] = math.nan
        graph.replay()
        if not skip:
            theirs.param_groups[0]["lr"] = value
            theirs.step()
    assert_same(mine, other)
    assert {int(state["step"]) for state in ours.state.values()} == {25}


def check_a_capture_that_would_make_states_is_refused() -> None:
    params = parameters((8,), (9,))
    give_gradients(params)
    optimizer = FusedAdam(params)
    for why in ("no state yet", "no longer stepped together"):
        with torch.cuda.stream(torch.cuda.Stream()):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                said = refusal(optimizer.step)
            finally:
                graph.capture_end()
        assert why in said, said
        optimizer.step()
        params[1].grad = None


def check_a_step_never_waits_for_the_gpu() -> None:
    params = parameters((4099,), (33, 7), dtype=BF16)
    optimizer = FusedAdam(params, lr=torch.tensor(1e-3, device="cuda"), master_weights=True)
    give_gradients(params)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_as_eager(backend: str) -> None:
    op = native().fused_adam_
    hyper = dict(HYPER)

    def train(lists: list[list[Tensor]], rate: Tensor) -> Tensor:
        op(*lists, **hyper, lr_tensor=rate * 2)
        return lists[0][0] * 2

    rate = torch.tensor(5e-3, device="cuda")
    eager, compiled = (tensors((5, 5000), steps=(1.0, 2.0)) for _ in range(2))
    expected = train(eager, rate)
    got = torch.compile(train, fullgraph=True, backend=backend)(compiled, rate)
    assert torch.equal(got, expected)
    assert_equal(compiled, eager)


def check_it_compiles_into_one_graph() -> None:
    compiled_as_eager("aot_eager")


def check_inductor_compiles_it_into_one_graph() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise Skipped(f"inductor needs triton: {error}") from error
    compiled_as_eager("inductor")


def check_opcheck_finds_nothing() -> None:
    numbers = {
        "lr_tensor": torch.tensor(1e-2), "grad_scale": torch.tensor([2.0]),
        "found_inf": torch.tensor([0.0]),
    }  # fmt: skip
    numbers = {name: number.cuda() for name, number in numbers.items()}
    op = native().fused_adam_
    torch.library.opcheck(op, tuple(tensors((5, 33), BF16, masters=True)), {**HYPER, **numbers})
    torch.library.opcheck(op, tuple(tensors((5, 33), steps=(0.0, 3.0))), HYPER)


def check_a_stale_gradient_is_noticed() -> None:
    lists = tensors((8,))
    param = lists[0][0].requires_grad_()
    loss = (param * param).sum()
    with torch.no_grad():
        native().fused_adam_(*lists, **HYPER)
    assert "modified by an inplace operation" in refusal(loss.backward)


# Refusals and devices


def check_wrong_tensors_are_refused_by_name_and_nothing_is_written() -> None:
    def refused(lists: list[list[Tensor]], message: str, **options: Tensor) -> None:
        before = clone(lists)
        said = refusal(lambda: native().fused_adam_(*lists, **HYPER, **options))
        assert message in said, said
        assert_equal(lists, before)

    for role in range(1, 6):
        lists = tensors((6, 6), BF16, masters=True, steps=(1.0, 1.0))
        lists[role][1] = lists[role][1].cpu()
        refused(lists, f"{ROLES[role]}[1] is not on cuda:0")
        if role < 5:
            lists[role][1] = torch.zeros(5, device="cuda")
            refused(lists, f"{ROLES[role]}[1] has 5 elements, params[1] has 6")
    lists = tensors((6,))
    refused(lists, "found_inf is not on cuda:0", found_inf=torch.zeros(1))
    refused(lists, "lr_tensor has 2 elements", lr_tensor=torch.zeros(2, device="cuda"))
    lists[2][0] = lists[2][0].double()
    refused(lists, "exp_avgs[0] has dtype float64")


def check_parameters_on_two_gpus_and_the_cpu() -> str:
    devices = ["cpu", *(f"cuda:{i}" for i in range(min(2, torch.cuda.device_count())))]
    shapes = ((4099,), (33, 7))
    mine, other = ([], [])
    for params in (mine, other):
        for device in devices:
            params.extend(parameters(*shapes, device=device))
    ours = FusedAdam(mine, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(other, lr=1e-2, weight_decay=0.1)
    for step in range(5):
        give_gradients(mine, other, seed=step)
        ours.step()
        theirs.step()
    assert_same(mine, other)
    assert torch.cuda.current_device() == 0
    return f"on {', '.join(devices)}" + ("" if len(devices) > 2 else "; there is no second GPU")


# The optimizer


def check_a_hundred_steps_go_where_torchs_go() -> None:
    for theirs, adam_w_mode in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        for options in ({"fused": True}, {"foreach": True}, {"capturable": True}):
            mine, other = (parameters((4099,), (33, 7), (), (0,)) for _ in range(2))
            hyper: dict[str, Any] = {
                "lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05
            }  # fmt: skip
            ours = FusedAdam(mine, adam_w_mode=adam_w_mode, **hyper)
            torchs = theirs(other, **hyper, **options)
            for step in range(100):
                give_gradients(mine, other, seed=step)
                ours.step()
                torchs.step()
            # torch rounds 1 - lr * weight_decay and the like, which 100 steps add up.
            assert_same(mine, other, rtol=2e-5)


def check_missing_gradients_and_gappy_parameters_work_as_in_torch() -> None:
    def make() -> list[Tensor]:
        base = [p.detach() for p in parameters((2, 3, 4, 5), (6, 8), (6, 8), (9,))]
        odd = [base[0].to(memory_format=torch.channels_last), base[1].t(), base[2][:, ::2], base[3]]
        return [tensor.requires_grad_() for tensor in odd]

    mine, other = make(), make()
    ours, theirs = FusedAdam(mine, lr=1e-2), torch.optim.AdamW(other, lr=1e-2, weight_decay=0.0)
    for step in range(9):
        give_gradients(mine, other, seed=step)
        if step % 3 == 0:
            mine[1].grad = other[1].grad = None
        ours.step()
        theirs.step()
    assert_same(mine, other)
    assert [int(ours.state[param]["step"]) for param in mine] == [9, 6, 9, 9]


def check_training_moves_between_torch_and_here_through_a_state_dict() -> None:
    for options in ({}, {"fused": True}, {"capturable": True}):
        mine, other = (parameters((4099,), (33, 7)) for _ in range(2))
        ours = FusedAdam(mine, lr=1e-2, weight_decay=0.1)
        torchs = torch.optim.AdamW(other, lr=1e-2, weight_decay=0.1, **options)
        for step in range(5):
            give_gradients(mine, other, seed=step)
            ours.step()
            torchs.step()
        here, there = FusedAdam(other), torch.optim.AdamW(mine, **options)
        here.load_state_dict(copy.deepcopy(torchs.state_dict()))
        there.load_state_dict(copy.deepcopy(ours.state_dict()))
        for step in range(5, 10):
            give_gradients(mine, other, seed=step)
            here.step()
            there.step()
        assert_same(mine, other)
        for optimizer in (here, there):
            assert {int(state["step"]) for state in optimizer.state.values()} == {10}


def check_loading_keeps_fp32_states_of_narrow_parameters() -> None:
    params = parameters((100,), dtype=BF16)
    give_gradients(params)
    optimizer = FusedAdam(params, master_weights=True)
    optimizer.step()
    resumed = FusedAdam(parameters((100,), dtype=BF16), master_weights=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    (state,) = resumed.state.values()
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        assert state[name].dtype == F32
        assert torch.equal(state[name], optimizer.state[params[0]][name])


# Plans


def check_fresh_gradients_of_many_tensors_are_stepped_as_torchs() -> None:
    for dtype in (F32, BF16):
        shapes = [(1 + 977 * i % 3000,) for i in range(300)]
        mine, other = (parameters(*shapes, dtype=dtype) for _ in range(2))
        for param in other:
            param.data = param.data.float()
        ours = FusedAdam(mine, lr=1e-2, weight_decay=0.1, master_weights=True)
        theirs = torch.optim.AdamW(other, lr=1e-2, weight_decay=0.1)
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            for a, b in zip(mine, other, strict=True):
                a.grad = torch.randn(a.shape, generator=generator).to("cuda", dtype)
                b.grad = a.grad.float()
            ours.step()
            theirs.step()
        assert ours._plans is not None
        assert ours._plans.of_group[0] is not None, "it was not planned"
        masters = [ours.state[p].get("master_param", p) for p in mine]
        assert_same(masters, other, rtol=2e-5)


def check_a_plan_does_not_outlive_what_it_was_made_for() -> None:
    mine, other = (parameters((300, 5), (17,), (4099,)) for _ in range(2))
    ours = FusedAdam(mine, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(other, lr=1e-2, weight_decay=0.1)
    for step in range(24):
        for param in (*mine, *other):
            param.grad = None
        give_gradients(mine, other, seed=step)
        if step == 4:
            mine[1].data = mine[1].data.clone()
        elif step == 8:
            for params, optimizer in ((mine, ours), (other, theirs)):
                optimizer.state[params[1]]["exp_avg"] = torch.full((17,), 0.5, device="cuda")
        elif step == 12:
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        elif step == 16:
            mine[0].grad = other[0].grad = None
        elif step == 20:
            mine[0].grad = mine[0].grad.t().contiguous().t()
        if step in (5, 9):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                ours.step()
            torch.cuda.synchronize()
        else:
            ours.step()
        theirs.step()
    assert_same(mine, other)


def check_a_kept_step_that_is_refused_says_which_gradient() -> None:
    lists = tensors((6, 600))
    plan, ticket = native().fused_adam_keep(*lists)
    for wrong, message in (
        (torch.zeros(5, device="cuda"), "grads[1] has 5 elements, params[1] has 600"),
        (torch.zeros(600), "grads[1] is not on cuda:0"),
        (torch.zeros(600, device="cuda", dtype=torch.float64), "grads[1] has dtype float64"),
    ):
        before = clone(lists)
        grads = [lists[1][0], wrong]
        said = refusal(lambda: native().fused_adam_kept_(plan, ticket, grads, **HYPER))  # noqa: B023
        assert message in said, said
        assert_equal(lists, before)
    before = clone(lists)
    odd = [lists[1][0], torch.zeros(1200, device="cuda")[::2]]
    assert native().fused_adam_kept_(plan, ticket, odd, **HYPER) == Status.LAYOUT
    assert_equal(lists, before)
    assert native().fused_adam_kept_(plan, ticket, lists[1], **HYPER) == Status.MADE
    assert "has 1 tensors, the plan has 2" in refusal(
        lambda: native().fused_adam_kept_(plan, ticket, lists[1][:1], **HYPER)
    )
    assert "not belong together" in refusal(
        lambda: native().fused_adam_kept_(plan[:-1], ticket, lists[1], **HYPER)
    )


def check_a_kept_step_is_that_of_lists_and_a_fake_plan_is_as_large() -> None:
    planned, lists = (tensors((6, 600, 5000), BF16, BF16, True, (1.0, 2.0, 3.0)) for _ in range(2))
    op = native()
    plan, ticket = op.fused_adam_keep(*planned)
    for _ in range(3):
        grads = [torch.randn_like(grad) for grad in lists[1]]
        op.fused_adam_kept_(plan, ticket, grads, **HYPER)
        op.fused_adam_(lists[0], grads, *lists[2:], **HYPER)
    assert_equal([planned[0], *planned[2:]], [lists[0], *lists[2:]])
    from opkiln.ops.optimizing.references import fake_plan

    for real, fake in zip((plan, ticket), fake_plan(*planned), strict=True):
        assert (real.shape, real.dtype, real.device) == (fake.shape, fake.dtype, fake.device)


def check_opcheck_finds_nothing_in_the_kept_form() -> None:
    # What a plan holds are addresses, so two of them are not compared.
    utils = ("test_schema", "test_faketensor")
    lists = tensors((5, 600), BF16, masters=True)
    torch.library.opcheck(native().fused_adam_keep, tuple(lists), test_utils=utils)
    plan, ticket = native().fused_adam_keep(*lists)
    arguments = (plan, ticket, lists[1])
    torch.library.opcheck(native().fused_adam_kept_, arguments, HYPER, test_utils=utils)


def check_clipped_steps_are_those_of_gradients_that_were_clipped() -> None:
    mine, other = (parameters((4099,), (33, 7)) for _ in range(2))
    ours = FusedAdam(mine, lr=1e-2, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(other, lr=1e-2, weight_decay=0.0)
    for step in range(6):
        give_gradients(mine, other, seed=step)
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            ours.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.nn.utils.clip_grad_norm_(other, 0.5)
        theirs.step()
    assert_same(mine, other, rtol=2e-5)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]

if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
