"""Evoformer attention: the CPU kernel, and the CUDA kernels in the emulator, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from evoformer_cases import CASES, Call, Case, check, grad_of, make
from stand_in import emulated_functions
from torch import Tensor

import opkiln
from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError
from opkiln.nn import evoformer_attention
from opkiln.ops.evoformer_attn import functions

LATE = pytest.param(torch.float16, marks=pytest.mark.full)


@pytest.fixture(scope="module")
def emulated() -> Any:
    """Both directions, whose kernels the emulator runs on CPU tensors."""
    both = (functions.evoformer_attention, functions.evoformer_attention_backward)
    return emulated_functions(*both)


def both_directions(of: Any, call: Call) -> list[Tensor]:
    out, moments = of.evoformer_attention(*call)
    grads = of.evoformer_attention_backward(
        grad_of(call), *call[:3], out, moments, *call[3:], True, True
    )
    return [out, *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, LATE])
def test_the_cpu_kernel_is_within_rounding_of_float64(dtype: torch.dtype) -> None:
    assert functions.evoformer_attention.load("cpu", dtype=str(dtype).removeprefix("torch."))
    for case in CASES:
        check(make(case, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, LATE])
def test_the_cuda_kernels_are_within_rounding_of_float64(
    emulated: Any, dtype: torch.dtype, whole_grid: bool
) -> None:
    for case in CASES:
        # Three tiles of keys, and two sequences with masks of their own, take seconds.
        if not whole_grid and (case.length > 70 or case.batch > 1):
            continue
        # A kernel works on one row and head; the emulator takes a second for a few tiles of them.
        long = case.length > 40 and case.batch == 1 and not whole_grid
        small = case._replace(rows=1, heads=1) if long else case
        call = make(small, dtype)
        check(call, emulated.evoformer_attention, emulated.evoformer_attention_backward)


def test_the_cuda_kernels_give_the_same_bits_each_time(emulated: Any) -> None:
    call = make(Case(rows=3, heads=1, length=33, head=16), torch.bfloat16)
    first, second = (both_directions(emulated, call) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_that_are_masked_out_have_equal_weights_and_their_gradients(emulated: Any) -> None:
    """The greatest score, -1e9, leaves no digits for the sum of the weights beside it."""
    call = make(Case(pair=False), torch.bfloat16)
    call.q.zero_()
    call.mask_bias.fill_(-1e9)
    check(call)
    check(call, emulated.evoformer_attention, emulated.evoformer_attention_backward)


def test_minus_infinity_everywhere_gives_nan_in_its_row_alone(emulated: Any) -> None:
    for of, dtype in ((functions, torch.bfloat16), (emulated, torch.float16)):
        call = make(Case(heads=1, head=16), dtype)
        call.mask_bias[0, 1] = -torch.inf
        out, *grads = both_directions(of, call)
        for each in (out, *grads[:3]):
            assert each[:, 1].isnan().all()
            assert each[:, 0].isfinite().all()


def test_tensors_with_other_strides_are_served(emulated: Any) -> None:
    call = make(Case(length=24, head=16), torch.bfloat16)
    moved = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in call[:3]]
    odd = torch.empty(call.q.numel() + 1, dtype=torch.bfloat16)[1:].view_as(call.q)
    mask, pair = (each.repeat_interleave(2, -1)[..., ::2] for each in call[3:5])
    changed = Call(moved[0], odd.copy_(call.k).transpose(1, 2).transpose(1, 2), moved[2], mask,
                   pair, call.scale)  # fmt: skip
    aligned = changed._replace(k=moved[1])
    want = functions.evoformer_attention(*call)[0]
    assert torch.equal(functions.evoformer_attention(*changed)[0], want)
    assert torch.equal(
        emulated.evoformer_attention(*aligned)[0], emulated.evoformer_attention(*call)[0]
    )
    grad = torch.ones(1, dtype=torch.bfloat16).expand(call.q.shape)
    results = [
        emulated.evoformer_attention_backward(
            each, *call[:3], *emulated.evoformer_attention(*call), *call[3:], True, True
        )
        for each in (grad, grad.contiguous())
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_rows_and_no_length_give_nothing(emulated: Any) -> None:
    for of in (functions, emulated):
        for case in (Case(rows=0), Case(length=0)):
            out, *grads = both_directions(of, make(case, torch.bfloat16))
            assert out.numel() == 0
            assert not grads[4].any()


# Gradients and graphs


def test_the_gradients_are_those_of_the_definition() -> None:
    call = make(Case(rows=2, length=3, heads=1, head=2), torch.float64)
    given = [each.requires_grad_() for each in call[:5]]
    assert torch.autograd.gradcheck(evoformer_attention, given)
    assert torch.autograd.gradgradcheck(evoformer_attention, given)


def test_autograd_gives_what_the_kernel_gives_and_only_what_is_wanted() -> None:
    call = make(Case(), torch.float32)
    want = both_directions(functions, call)
    given = [each.clone().requires_grad_(i != 3) for i, each in enumerate(call[:5])]
    out = evoformer_attention(*given)
    out.backward(grad_of(call))
    assert torch.equal(out, want[0])
    assert given[3].grad is None
    for i in (0, 1, 2, 4):
        assert torch.equal(given[i].grad, want[1 + i])


def test_a_compiled_step_is_one_graph() -> None:
    call = make(Case(), torch.float32)

    def step(*given: Tensor) -> Tensor:
        return evoformer_attention(*given).square().sum()

    grads = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = [each.clone().requires_grad_() for each in call[:5]]
        run(*given).backward()
        grads.append([each.grad for each in given])
    torch.testing.assert_close(*grads)


def test_opcheck_finds_nothing() -> None:
    call = make(Case(rows=1, length=9, heads=1, head=8), torch.float32)
    q, k, v, mask, pair = (each.requires_grad_() for each in call[:5])
    torch.library.opcheck(
        functions.evoformer_attention.overload, (q, k, v, mask, pair, call.scale),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    with torch.no_grad():
        results = functions.evoformer_attention(*call)
    arguments = (grad_of(call), *call[:3], *results, *call[3:], True, False)
    torch.library.opcheck(
        functions.evoformer_attention_backward.overload,
        tuple(each.detach() if isinstance(each, Tensor) else each for each in arguments),
    )


# The front end


def test_a_call_without_a_batch_is_a_batch_of_one() -> None:
    call = make(Case(), torch.float32)
    want = evoformer_attention(*call[:5])
    assert torch.equal(evoformer_attention(*(each[0] for each in call[:5])), want[0])


def test_wrong_arguments_are_named() -> None:
    q, k, v, mask, pair, _ = make(Case(), torch.float32)
    wrong: list[tuple[str, Any]] = [
        ("q has shape", lambda: evoformer_attention(q[0, 0], k, v)),
        ("k has shape", lambda: evoformer_attention(q, k[:, :1], v)),
        ("v has dtype float16, q has float32", lambda: evoformer_attention(q, k, v.half())),
        ("mask_bias has shape", lambda: evoformer_attention(q, k, v, mask[..., 1:])),
        ("pair_bias has shape", lambda: evoformer_attention(q, k, v, mask, pair[:, :, :1])),
    ]
    for message, call in wrong:
        with pytest.raises(UsageError, match=message):
            call()


def test_libraries_are_known_by_name() -> None:
    name = "evoformer_attn__backward__bfloat16"
    assert name in {opkiln.ALL_OPS[name].NAME}
    assert "evoformer_attn" in opkiln.ALL_OPS


# DeepSpeed's module


def test_deepspeeds_module_gives_results_and_gradients_in_given_tensors() -> None:
    """With the calls that its front end makes."""
    q, k, v, mask, pair, scale = make(Case(batch=2, rows=3), torch.bfloat16)
    want = both_directions(functions, Call(q, k, v, mask, pair, scale))
    out, lse = torch.empty_like(q), torch.full((6, 2, 64), torch.nan)
    module: Any = OpModule("evoformer_attn")
    module.attention(q, k, v, mask, pair, out, lse)
    assert torch.equal(out, want[0])
    given = [torch.empty_like(each) for each in (q, k, v)]
    biases = [torch.zeros_like(each, dtype=torch.float32) for each in (mask, pair)]
    grad = grad_of(Call(q, k, v, mask, pair, scale))
    module.attention_bwd(
        grad, q, k, v, out, lse, torch.empty_like(lse), mask, pair, *given, *biases
    )
    for ours, theirs in zip((*given, *biases), want[1:], strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=2e-2, atol=2e-3)
    none = torch.tensor([], dtype=torch.bfloat16)
    module.attention(q, k, v, none, none, out, lse)
    assert torch.equal(out, functions.evoformer_attention(q, k, v, None, None, scale)[0])
    module.attention_bwd(grad, q, k, v, out, lse, lse, none, none, *given, none, none)
    assert given[0].isfinite().all()
