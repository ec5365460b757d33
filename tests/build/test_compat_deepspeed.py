"""The functions of DeepSpeed's modules over opkiln's ops, called as its front ends call them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepspeed_given import warm  # noqa: F401 (a fixture)
from torch import Tensor

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import SettingError, UsageError
from opkiln.settings import settings

STEPS = 5
CHUNK = 2048 * 32  # what DeepSpeed's front ends pass


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _gradient(step: int, like: Tensor) -> Tensor:
    return _normal(*like.shape, seed=100 + step, dtype=like.dtype)


def _by_torch(kind: Any, start: Tensor, **options: Any) -> Tensor:
    """The parameter after as many steps of torch's optimizer, in float64."""
    param = start.double().requires_grad_()
    optimizer = kind([param], **options)
    for step in range(1, STEPS + 1):
        param.grad = _gradient(step, start).double()
        optimizer.step()
    return param.detach()


# Optimizers in host memory


@pytest.mark.parametrize(
    ("adamw_mode", "kind"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)]
)
def test_cpu_adam_makes_the_steps_of_torchs(adamw_mode: bool, kind: Any) -> None:
    start = _normal(1003)
    param, m, v = start.clone(), torch.zeros(1003), torch.zeros(1003)
    module = OpModule("cpu_adam")
    assert module.create_adam(7, 1e-2, 0.9, 0.999, 1e-8, 0.1, adamw_mode, True) == 0
    for step in range(1, STEPS + 1):
        grad = _gradient(step, start)
        kept = grad.clone()
        done = module.adam_update(7, step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, param, grad, m, v)
        assert done == 0
        assert torch.equal(grad, kept)
    exact = _by_torch(kind, start, lr=1e-2, weight_decay=0.1)
    torch.testing.assert_close(param.double(), exact, rtol=1e-5, atol=1e-6)
    assert module.destroy_adam(7) == module.destroy_adam(7) == 0


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_cpu_adam_takes_the_types_that_deepspeed_keeps_states_in(state: torch.dtype) -> None:
    start = _normal(129, dtype=torch.bfloat16)
    param, m, v = start.clone(), torch.zeros(129, dtype=state), torch.zeros(129, dtype=state)
    module = OpModule("cpu_adam")
    module.create_adam(0, 1e-2, 0.9, 0.999, 1e-8, 0.0, True, False)
    for step in range(1, STEPS + 1):
        grad = _gradient(step, start)
        module.adam_update(0, step, 1e-2, 0.9, 0.999, 1e-8, 0.0, True, param, grad, m, v)
    exact = _by_torch(torch.optim.AdamW, start, lr=1e-2, weight_decay=0.0)
    torch.testing.assert_close(param.double(), exact, rtol=0.03, atol=0.02)


def test_cpu_adam_undoes_a_step() -> None:
    start = _normal(64)
    param, m, v = start.clone(), _normal(64, seed=1) * 0.1, _normal(64, seed=2).square()
    before = [tensor.clone() for tensor in (param, m, v)]
    module = OpModule("cpu_adam")
    module.create_adam(0, 1e-2, 0.9, 0.99, 1e-8, 0.1, True, False)
    given = (0, 3, 1e-2, 0.9, 0.99, 1e-8, 0.1, True, param, _gradient(1, start), m, v)
    module.adam_update(*given)
    assert not torch.equal(param, before[0])
    assert module.adam_rollback(*given) == 0
    for tensor, was in zip((param, m, v), before, strict=True):
        torch.testing.assert_close(tensor, was, rtol=1e-5, atol=1e-6)


def test_a_tensor_with_gaps_is_stepped_itself() -> None:
    whole = _normal(10, 8)
    param, start = whole[:, ::2], whole[:, ::2].clone()
    m, v = torch.zeros(10, 4), torch.zeros(4, 10).t()
    module = OpModule("cpu_adam")
    module.create_adam(0, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, False)
    others = whole[:, 1::2].clone()
    for step in range(1, STEPS + 1):
        grad = _gradient(step, start)
        module.adam_update(0, step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, param, grad, m, v)
    exact = _by_torch(torch.optim.AdamW, start, lr=1e-2, weight_decay=0.1)
    torch.testing.assert_close(param.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(whole[:, 1::2], others)
    assert v.abs().sum() > 0


def test_an_optimizer_that_was_not_made_is_an_error_and_not_a_crash() -> None:
    module = OpModule("cpu_adam")
    tensors = [torch.zeros(4) for _ in range(4)]
    with pytest.raises(UsageError, match="there is no optimizer 3"):
        module.adam_update(3, 1, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, *tensors)


def test_what_a_step_cannot_take_is_named() -> None:
    module = OpModule("cpu_adam")
    module.create_adam(0, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, False)
    tensors = [torch.zeros(4), torch.zeros(5), torch.zeros(4), torch.zeros(4)]
    with pytest.raises(RuntimeError, match=r"grads\[0\] has 5 elements"):
        module.adam_update(0, 1, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, *tensors)


def test_cpu_adagrad_makes_the_steps_of_torchs() -> None:
    start = _normal(1003)
    param, sums = start.clone(), torch.zeros(1003)
    module = OpModule("cpu_adagrad")
    module.create_adagrad(0, 1e-2, 1e-10, 0.1, False)
    for step in range(1, STEPS + 1):
        grad = _gradient(step, start)
        kept = grad.clone()
        assert module.adagrad_update(0, step, 1e-2, 1e-10, 0.1, param, grad, sums) == 0
        assert torch.equal(grad, kept)
    exact = _by_torch(torch.optim.Adagrad, start, lr=1e-2, weight_decay=0.1)
    torch.testing.assert_close(param.double(), exact, rtol=1e-5, atol=1e-6)
    assert module.destroy_adagrad(0) == 0


def _lion(start: Tensor, lr: float, beta1: float, beta2: float, decay: float) -> Tensor:
    param, m = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        grad = _gradient(step, start).double()
        param = param * (1 - lr * decay) - lr * (beta1 * m + (1 - beta1) * grad).sign()
        m = beta2 * m + (1 - beta2) * grad
    return param


def test_cpu_lion_makes_the_steps_of_the_paper() -> None:
    start = _normal(1003)
    param, m = start.clone(), torch.zeros(1003)
    module = OpModule("cpu_lion")
    module.create_lion(0, 1e-2, 0.9, 0.99, 0.1, False)
    for step in range(1, STEPS + 1):
        grad = _gradient(step, start)
        assert module.lion_update(0, step, 1e-2, 0.9, 0.99, 0.1, param, grad, m) == 0
    torch.testing.assert_close(param.double(), _lion(start, 1e-2, 0.9, 0.99, 0.1),
                               rtol=1e-5, atol=1e-6)  # fmt: skip
    zero = torch.zeros(4)
    module.lion_update(0, 1, 1e-2, 0.9, 0.99, 0.0, zero, torch.zeros(4), torch.zeros(4))
    assert torch.equal(zero, torch.zeros(4)), "what has no gradient stays where it is"


# Optimizers over lists


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mode", "kind"), [(1, torch.optim.AdamW), (0, torch.optim.Adam)])
def test_fused_adam_makes_the_steps_of_torchs(dtype: torch.dtype, mode: int, kind: Any) -> None:
    starts = [_normal(n, seed=n, dtype=dtype) for n in (5, 128, 1003)]
    params = [start.clone().requires_grad_() for start in starts]  # as it hands on those of bf16
    m, v = ([torch.zeros_like(start) for start in starts] for _ in range(2))
    module, noop = OpModule("fused_adam"), torch.zeros(1, dtype=torch.int32)
    for step in range(1, STEPS + 1):
        grads = [_gradient(step, start) for start in starts]
        lists = [grads, params, m, v]
        module.multi_tensor_adam(CHUNK, noop, lists, 1e-2, 0.9, 0.999, 1e-8, step, mode, 1, 0.1)
    slack = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    for start, param, average in zip(starts, params, m, strict=True):
        exact = _by_torch(kind, start, lr=1e-2, weight_decay=0.1)
        torch.testing.assert_close(param.detach().double(), exact, **slack)
        assert average.dtype == dtype
        assert average.abs().sum() > 0
    module.multi_tensor_adam(CHUNK, noop, [[], [], [], []], 1e-2, 0.9, 0.9, 1e-8, 1, 1, 1, 0.1)


def test_fused_lion_makes_the_steps_of_the_paper() -> None:
    starts = [_normal(n, seed=n) for n in (5, 128, 1003)]
    params = [start.clone() for start in starts]
    m = [torch.zeros_like(start) for start in starts]
    module, noop = OpModule("fused_lion"), torch.zeros(1, dtype=torch.int32)
    for step in range(1, STEPS + 1):
        lists = [[_gradient(step, start) for start in starts], params, m]
        module.multi_tensor_lion(CHUNK, noop, lists, 1e-2, 0.9, 0.99, step, 0.1)
    for start, param in zip(starts, params, strict=True):
        torch.testing.assert_close(param.double(), _lion(start, 1e-2, 0.9, 0.99, 0.1),
                                   rtol=1e-5, atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("mode", [0, 1])
def test_fused_lamb_makes_deepspeeds_step_and_gives_its_coefficient(mode: int) -> None:
    lr, beta1, beta2, eps, decay, scale = 1e-2, 0.9, 0.999, 1e-6, 0.1, 4.0
    p, m, v = _normal(300), _normal(300, seed=1) * 0.1, _normal(300, seed=2).square()
    g, step = _normal(300, seed=3), 3
    exact_p, exact_m, exact_v, exact_g = (tensor.double() for tensor in (p, m, v, g))
    exact_g = exact_g / scale
    exact_m = beta1 * exact_m + (1 - beta1) * exact_g
    exact_v = beta2 * exact_v + (1 - beta2) * exact_g * exact_g
    root = (exact_v + eps).sqrt() if mode == 0 else exact_v.sqrt() + eps
    update = exact_m / root + decay * exact_p
    ratio = (exact_p.norm() / update.norm()).clamp(0.01, 10.0)
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    exact_p = exact_p - rate * ratio * update
    copy = torch.empty(300, dtype=torch.float16)
    found = OpModule("fused_lamb").lamb(
        p, copy, m, v, g, lr, beta1, beta2, 10.0, 0.01, eps, scale, step, mode, 1, decay
    )
    torch.testing.assert_close(p.double(), exact_p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(m.double(), exact_m, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), ratio.view(1), rtol=1e-5, atol=1e-6)
    assert torch.equal(copy, p.half())


# The quantizer


@pytest.fixture
def quantizer() -> OpModule:
    return OpModule("quantizer")


def _numbers(values: Tensor, params: Tensor, bits: int) -> Tensor:
    """What DeepSpeed's tensors stand for, a group to a row, by the words of its kernels."""
    levels = values.reshape(-1)
    if bits == 4:
        halves = torch.stack([levels >> 4, (levels << 4) >> 4], dim=1)  # arithmetic: signed
        levels = halves.reshape(-1)
    rows = levels.reshape(params.shape[0], -1).double() * params[:, :1].double()
    return rows + params[:, 1:].double() if params.shape[1] == 2 else rows


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shape", "groups"), [((32, 64), 32), ((4, 32), 16), ((3, 8), 1),
                                               ((2, 60), 10), ((40,), 5)])  # fmt: skip
def test_levels_and_scales_are_laid_out_as_deepspeeds(
    quantizer: OpModule, bits: int, symmetric: bool, shape: tuple[int, ...], groups: int
) -> None:
    x = _normal(*shape, dtype=torch.float16) + 0.5
    kind = quantizer.Symmetric if symmetric else quantizer.Asymmetric
    values, params = quantizer.quantize(x, groups, bits, kind)
    assert values.dtype == torch.int8
    assert values.shape == (*shape[:-1], shape[-1] * bits // 8)
    assert params.dtype == torch.float32
    assert params.shape == (groups, 1 if symmetric else 2)
    rows = x.double().reshape(groups, -1)
    error = (_numbers(values, params, bits) - rows).abs()
    # The greatest element is beyond the greatest level, by a step at most.
    assert bool((error <= params[:, :1].double() * 1.001 + 1e-3).all())
    for function, dtype in ((quantizer.dequantize, torch.float16),
                            (quantizer.dequantize_fp32, torch.float32)):  # fmt: skip
        back = function(values, params, groups, bits, kind)
        assert back.dtype == dtype
        assert back.shape == x.shape
        exact = _numbers(values, params, bits).reshape(x.shape)
        torch.testing.assert_close(back.double(), exact, rtol=1e-3, atol=1e-3)


def test_each_dtype_is_quantized_as_what_it_is(quantizer: OpModule) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = _normal(4, 64, dtype=dtype)
        values, params = quantizer.quantize(x, 4, 8, quantizer.Symmetric)
        error = (_numbers(values, params, 8) - x.double()).abs()
        assert bool((error <= params.double() * 1.001).all()), dtype


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [64, 20])
def test_parts_are_summed(quantizer: OpModule, bits: int, symmetric: bool, size: int) -> None:
    kind = quantizer.Symmetric if symmetric else quantizer.Asymmetric
    devices, groups = 3, 6
    x = _normal(devices * groups, size) + 0.3
    values, params = quantizer.quantize(x, devices * groups, bits, kind)
    out, scales = quantizer.quantized_reduction(
        values.reshape(-1), params, devices * groups, groups, bits, kind, devices
    )
    assert out.shape == (values.numel() // devices,)
    assert scales.shape == (groups, 1 if symmetric else 2)
    exact = _numbers(values, params, bits).view(devices, groups, size).sum(0)
    error = (_numbers(out, scales, bits) - exact).abs()
    # A step at most where a sum is cut off, and the rounding of fp16 sums.
    assert bool((error <= scales[:, :1].double() * 1.001 + 1e-2).all())


def test_other_groups_come_out_of_a_reduction_than_went_in(quantizer: OpModule) -> None:
    x = _normal(2, 8, 32)
    values, params = quantizer.quantize(x, 16, 8, quantizer.Symmetric)
    out, scales = quantizer.quantized_reduction(
        values.reshape(-1), params, 16, 4, 8, quantizer.Symmetric, 2
    )
    exact = _numbers(values, params, 8).view(2, -1).sum(0).view(4, -1)
    assert scales.shape == (4, 1)
    assert bool(((_numbers(out, scales, 8) - exact).abs() <= scales.double() * 1.001 + 1e-2).all())
    with pytest.raises(UsageError, match="in_groups is 15, expected a multiple of parts = 2"):
        quantizer.quantized_reduction(values.reshape(-1), params, 15, 4, 8, quantizer.Symmetric, 2)


def test_what_cannot_be_quantized_is_named(quantizer: OpModule) -> None:
    x = _normal(100)
    with pytest.raises(UsageError, match="100 elements cannot form 3 groups"):
        quantizer.quantize(x, 3, 8, quantizer.Symmetric)
    with pytest.raises(UsageError, match="num_bits is 3, expected 4 or 8"):
        quantizer.quantize(x, 4, 3, quantizer.Symmetric)
    with pytest.raises(UsageError, match="params has 3 elements, expected 4"):
        quantizer.dequantize(
            torch.zeros(64, dtype=torch.int8), torch.ones(3), 4, 8, quantizer.Symmetric
        )
    with pytest.raises(UsageError, match="data_in has 64 elements, expected num_group"):
        quantizer.dequantize_int8_to_half_experimental(
            torch.zeros(64, dtype=torch.uint8), torch.ones(3), torch.ones(3), 3, 24
        )
    with pytest.raises(UsageError, match="has dtype int64, expected"):
        quantizer.quantize(torch.zeros(64, dtype=torch.int64), 2, 8, quantizer.Symmetric)


# The rest


def test_bytes_of_a_tensor_are_a_view() -> None:
    module = OpModule("utils")
    x = torch.arange(6, dtype=torch.int16).view(2, 3)
    found = module.cast_to_byte_tensor(x)
    assert isinstance(found, Tensor)
    assert found.shape == (12,)
    assert found.data_ptr() == x.data_ptr()
    one = torch.zeros(1, dtype=torch.uint8)
    listed = module.cast_to_byte_tensor([x, one])
    assert [each.numel() for each in listed] == [12, 1]
    flat = module.flatten([x, x])
    assert [torch.equal(each, x) for each in module.unflatten(flat, [x, x])] == [True, True]


def test_a_module_lists_its_functions_and_knows_no_others() -> None:
    module = OpModule("fused_lamb")
    assert "lamb" in dir(module)
    assert module.__name__ == "fused_lamb"
    assert getattr(module, "CUDA_IMPL", None) is None
    with pytest.raises(AttributeError, match="module 'fused_lamb' has no attribute 'nothing'"):
        module.nothing  # noqa: B018 (asking is what is tested)


def test_functions_of_deepspeeds_alone_come_from_its_module_when_they_are_asked_for() -> None:
    class Theirs:
        def __init__(self) -> None:
            self.made: list[tuple[Any, ...]] = []
            self.gone: list[int] = []

        def create_adam(self, *given: Any) -> None:
            self.made.append(given)

        def destroy_adam(self, optimizer_id: int) -> None:
            self.gone.append(optimizer_id)

        def zenflow_adam_ctrl_size(self) -> int:
            return 42

    theirs = Theirs()
    asked: list[str] = []
    module = OpModule(
        "cpu_adam", lambda: asked.append("built") or theirs, lambda: ("zenflow_adam_ctrl_size",)
    )
    module.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    assert asked == []
    assert module.zenflow_adam_ctrl_size() == module.zenflow_adam_ctrl_size() == 42
    assert asked == ["built"]
    module.create_adam(1, 1e-3, 0.9, 0.999, 1e-8, 0.0, False, False)
    assert [(each[0], each[6]) for each in theirs.made] == [(0, True), (1, False)]
    module.destroy_adam(1)
    assert theirs.gone == [1]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("", {"": ("ops", "engine")}), ("ops", {"": ("ops",)}),
     ("engine,ops", {"": ("ops", "engine")}),
     ("off", {"": ()}), ("cpu_adam=engine", {"": ("ops", "engine"), "cpu_adam": ("engine",)}),
     ("ops, quantizer=off", {"": ("ops",), "quantizer": ()})],
)  # fmt: skip
def test_the_setting_says_what_serves_which_op(
    monkeypatch: pytest.MonkeyPatch, text: str, meant: dict[str, tuple[str, ...]]
) -> None:
    monkeypatch.setenv("OPKILN_DEEPSPEED", text)
    assert dict(settings.deepspeed) == meant


@pytest.mark.parametrize("text", ["on", "off,ops", "cpu adam=ops", "cpu_adam=", "=ops"])
def test_a_setting_that_means_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OPKILN_DEEPSPEED", text)
    with pytest.raises(SettingError, match="OPKILN_DEEPSPEED"):
        _ = settings.deepspeed
