"""DeepSpeed's front ends on opkiln's ops on a GPU: one line per check. Needs DeepSpeed, no pytest.

    TORCH_CUDA_ARCH_LIST=9.0a PYTHONPATH=src python tests/gpu/deepspeed_on_opkiln.py [--only WORD]

The checks with "own sources" in their name have opkiln's engine build DeepSpeed's CUDA sources,
which include torch's headers: minutes on a small machine.
The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch
from checks import Skipped, main
from torch import Tensor

import opkiln.compat.deepspeed as on_opkiln
from opkiln.errors import CompileError, UsageError

DEVICE = "cuda"
STEPS = 20


def installed() -> None:
    """DeepSpeed's builders on opkiln, from here on."""
    try:
        on_opkiln.install()
    except UsageError as error:
        raise Skipped(error.what) from error


def origin(op: str) -> str:
    found = on_opkiln.served()[op]
    return f"{found.origin}, loaded in {found.seconds * 1e3:.1f} ms"


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def models(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters of several sizes, and the same in fp32 for torch's optimizer."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((7,), (513, 17), (1000, 100), (64, 3, 3, 3))
    made = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    ours = [tensor.clone().requires_grad_() for tensor in made]
    return ours, [tensor.float().requires_grad_() for tensor in made]


def train(ours: Any, theirs: Any, params: list[Tensor], others: list[Tensor]) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for param, other in zip(params, others, strict=True):
            value = torch.randn(param.shape, generator=generator).to(DEVICE, param.dtype)
            param.grad, other.grad = value, value.to(other.dtype)
        ours.step()
        theirs.step()


def check_deepspeeds_own_builder_on_this_arch_list() -> str:
    """What DeepSpeed's builder does itself with ``9.0a``."""
    done = in_a_process(
        "from deepspeed.ops.op_builder import FusedAdamBuilder as B\n"
        "try: B().load(); print('it takes 9.0a')\n"
        "except ValueError as error: print(f'it crashes: ValueError: {error}')\n",
        TORCH_CUDA_ARCH_LIST="9.0a",
    )
    return said_by(done)


def check_fused_adam_front_end_on_opkiln() -> str:
    installed()
    from deepspeed.ops.adam import FusedAdam

    for mode, kind in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        params, others = models()
        ours = FusedAdam(params, lr=1e-2, weight_decay=0.1, adam_w_mode=mode)
        train(ours, kind(others, lr=1e-2, weight_decay=0.1), params, others)
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-5)
    assert on_opkiln.served()["fused_adam"].origin == "ops"
    return origin("fused_adam")


def check_fused_adam_front_end_on_opkiln_with_16_bits() -> None:
    installed()
    from deepspeed.ops.adam import FusedAdam

    for dtype in (torch.bfloat16, torch.float16):
        params, others = models(dtype)
        ours = FusedAdam(params, lr=1e-3, eps=1e-4)
        train(ours, torch.optim.AdamW(others, lr=1e-3, eps=1e-4, weight_decay=0.0), params, others)
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param.float(), other, rtol=0.05, atol=0.02)
            assert ours.state[param]["exp_avg"].dtype == dtype


def check_fused_adam_front_end_on_opkiln_trains_and_loads_a_state_dict() -> str:
    installed()
    from deepspeed.ops.adam import FusedAdam

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    net = net.to(DEVICE)
    x, y = torch.randn(256, 64, device=DEVICE), torch.randn(256, 8, device=DEVICE)
    optimizer = FusedAdam(net.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        if step == 30:
            saved = optimizer.state_dict()
            optimizer = FusedAdam(net.parameters(), lr=1e-2)
            optimizer.load_state_dict(saved)
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[29] < losses[0] / 2, losses
    return f"loss {losses[0]:.3f} -> {losses[-1]:.4f}"


def check_fused_lion_front_end_on_opkiln() -> str:
    installed()
    from deepspeed.ops.lion import FusedLion

    params, _ = models()
    exact = [param.detach().double() for param in params]
    averages = [torch.zeros_like(each) for each in exact]
    optimizer = FusedLion(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for i, param in enumerate(params):
            value = torch.randn(param.shape, generator=generator).to(DEVICE)
            param.grad, grad = value, value.double()
            blend = 0.9 * averages[i] + 0.1 * grad
            exact[i] = exact[i] * (1 - 1e-4) - 1e-3 * blend.sign()
            averages[i] = 0.99 * averages[i] + 0.01 * grad
        optimizer.step()
    for param, other in zip(params, exact, strict=True):
        torch.testing.assert_close(param.double(), other, rtol=1e-4, atol=1e-5)
    return origin("fused_lion")


def check_fused_lamb_front_end_on_opkiln() -> str:
    installed()
    from deepspeed.ops.lamb import FusedLamb

    params, _ = models()
    exact = [param.detach().double() for param in params]
    m = [torch.zeros_like(each) for each in exact]
    v = [torch.zeros_like(each) for each in exact]
    optimizer = FusedLamb(params, lr=1e-2, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        coefficients = []
        for i, param in enumerate(params):
            param.grad = torch.randn(param.shape, generator=generator).to(DEVICE)
            grad = param.grad.double()
            m[i] = 0.9 * m[i] + 0.1 * grad
            v[i] = 0.999 * v[i] + 0.001 * grad * grad
            update = m[i] / (v[i].sqrt() + 1e-8) + 0.1 * exact[i]
            coefficients.append((exact[i].norm() / update.norm()).clamp(0.01, 10.0).item())
            rate = 1e-2 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
            exact[i] = exact[i] - rate * coefficients[-1] * update
        optimizer.step()
    for param, other in zip(params, exact, strict=True):
        torch.testing.assert_close(param.double(), other, rtol=1e-3, atol=1e-4)
    found = torch.tensor(optimizer.get_lamb_coeffs()).view(-1)
    torch.testing.assert_close(found, torch.tensor(coefficients), rtol=1e-3, atol=1e-4)
    return origin("fused_lamb")


def check_cuda_quantizer_front_end_on_opkiln() -> str:
    """That of ZeRO's quantized weights; sizes whose groups it makes 8 elements small are among
    them."""
    installed()
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    quantizer = CUDAQuantizer()
    for numel in (4096 * 4096, 8 * 1009, 8, 768 * 2048):
        for dtype in (torch.float16, torch.bfloat16):
            weight = torch.randn(numel, device=DEVICE).to(dtype)
            values, scales = quantizer.quantize(weight)
            back = quantizer.dequantize(values, scales, dtype=dtype)
            assert values.dtype == torch.int8
            assert back.dtype == dtype
            assert scales.shape[1] == 1
            rows = weight.double().view(scales.shape[0], -1)
            error = (back.double().view_as(rows) - rows).abs()
            # A step where the greatest element is cut off, and the rounding of the dtype.
            slack = 1.01 * scales.double() + rows.abs().amax(1, keepdim=True) * 2**-8
            assert bool((error <= slack).all()), (numel, dtype, error.max())
    assert on_opkiln.served()["quantizer"].origin == "ops"
    return origin("quantizer")


def check_inference_dequantizer_front_end_on_opkiln() -> None:
    """That of weight-only quantized inference."""
    installed()
    from deepspeed.inference.quantization.utils import DeQuantizer, Quantizer

    for bits in (8, 4):
        config = {"num_bits": bits, "group_size": 64, "group_dim": 1, "symmetric": False}
        weight = torch.randn(128, 1024, device=DEVICE, dtype=torch.float16)
        found = Quantizer(config).quantize(weight)
        back = DeQuantizer(config, torch.float16).dequantize(*found)
        assert back.shape == weight.shape
        step = (weight.float().max() - weight.float().min()) / (2**bits - 1)
        assert (back.float() - weight.float()).abs().max() <= 0.6 * step


def check_quantized_all_reduce_front_end_on_opkiln() -> str:
    """The calls of ``all_to_all_quant_reduce``, with what other ranks send in one tensor."""
    installed()
    from deepspeed.ops.op_builder import QuantizerBuilder

    module = QuantizerBuilder().load()
    devices, nodes, groups, size = 4, 2, 256, 512
    tensors = [torch.randn(groups, size, device=DEVICE).half() for _ in range(devices)]
    sent = [module.swizzle_quant(t, groups, 4, module.Symmetric, 1, nodes, devices)
            for t in tensors]  # fmt: skip
    rank = 1  # what each device sends to this one of its node, one after the other
    values = torch.cat([each[0].view(devices, -1)[rank] for each in sent])
    scales = torch.cat([each[1].view(devices, -1, 1)[rank] for each in sent])
    out, out_scales = module.quantized_reduction(
        values, scales, groups, groups // devices, 4, module.Symmetric, devices
    )
    back = module.dequantize(out, out_scales, out_scales.numel(), 4, module.Symmetric)
    parts = torch.stack(tensors).double().sum(0).view(nodes, devices, -1)[:, rank]
    error = (back.double().view(nodes, -1) - parts).abs().mean() / parts.abs().mean()
    assert error < 0.3, error  # four bits, twice
    return f"mean error {error:.1%} at 4 bits"


def check_warm_loads_on_opkiln() -> str:
    """Fresh processes, with the store that the checks before have filled."""
    code = (
        "import time, torch, opkiln.compat.deepspeed.auto\n"
        "from deepspeed.ops import op_builder\n"
        "begin = time.perf_counter(); getattr(op_builder, '{}')().load()\n"
        "print(f'{{(time.perf_counter() - begin) * 1e3:.1f}} ms')\n"
    )
    names = ("FusedAdamBuilder", "QuantizerBuilder")
    return ", ".join(f"{name} {said_by(in_a_process(code.format(name)))}" for name in names)


def check_own_sources_of_fused_adam_are_built_by_the_engine() -> str:
    code = (
        "import time, torch, opkiln.compat.deepspeed as on_opkiln\n"
        "on_opkiln.install()\n"
        "from deepspeed.ops.adam import FusedAdam\n"
        "begin = time.perf_counter()\n"
        "p = [torch.ones(1000, device='cuda', requires_grad=True)]\n"
        "q = [torch.ones(1000, device='cuda', requires_grad=True)]\n"
        "ours, theirs = FusedAdam(p, lr=1e-2), torch.optim.AdamW(q, lr=1e-2, weight_decay=0.0)\n"
        "for step in range(5):\n"
        "    g = torch.randn(1000, device='cuda'); p[0].grad = g; q[0].grad = g.clone()\n"
        "    ours.step(); theirs.step()\n"
        "torch.testing.assert_close(p[0], q[0], rtol=1e-4, atol=1e-5)\n"
        "found = on_opkiln.served()['fused_adam']\n"
        "assert found.origin == 'engine', found\n"
        "print(f'{found.origin}, {found.seconds:.1f} s')\n"
    )
    return said_by(in_a_process(code, OPKILN_DEEPSPEED="engine"))


def check_own_sources_of_quantizer_give_the_same_bits() -> str:
    """Every function of DeepSpeed's own kernels, beside opkiln's op: levels, scales and numbers.

    Group sizes are those for which DeepSpeed's kernels launch whole warps. Where they launch fewer
    threads they shuffle with threads that are not there.
    """
    installed()
    from deepspeed.ops.op_builder import QuantizerBuilder

    from opkiln.compat.deepspeed import engine
    from opkiln.compat.deepspeed.modules import OpModule

    begin = time.perf_counter()
    theirs = engine.load(QuantizerBuilder())
    took, ours, compared = time.perf_counter() - begin, OpModule("quantizer"), 0

    def same(function: str, *args: Any) -> Any:
        nonlocal compared
        calls = [
            [kind(int(each)) if isinstance(each, ours.QuantizationType) else each for each in args]
            for kind in (ours.QuantizationType, theirs.QuantizationType)
        ]
        found, expected = getattr(ours, function)(*calls[0]), getattr(theirs, function)(*calls[1])
        torch.cuda.synchronize()
        pair = ([found], [expected]) if isinstance(found, Tensor) else (found, expected)
        for a, b in zip(*pair, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (function, args[1:])
            equal = (
                torch.equal(a, b)
                if not a.is_floating_point()
                else torch.equal(a.nan_to_num(nan=-7e4), b.nan_to_num(nan=-7e4))
            )
            assert equal, (function, args[1:], (a != b).sum().item())
            compared += a.numel()
        return expected

    generator = torch.Generator().manual_seed(0)
    for bits in (4, 8):
        for kind in (ours.Symmetric, ours.Asymmetric):
            for size in (8, 24, 96, 128, 264, 512, 1000, 2048, 4096, 4104, 8192, 16384):
                groups = 64
                x = (torch.randn(groups, size, generator=generator) + 0.3).half().to(DEVICE)
                x[0], x[1], x[2, 3], x[3, 3] = 0.0, 2.0, float("nan"), float("inf")
                levels, params = same("quantize", x, groups, bits, kind)
                same("dequantize", levels, params, groups, bits, kind)
                same("dequantize_fp32", levels, params, groups, bits, kind)
                same("swizzle_quant", x, groups, bits, kind, 2, 2, 4)
            for size in (264, 512, 1000, 2048, 4096):
                # Of several asymmetric parts DeepSpeed reads the wrong parameters.
                for parts in (1,) if kind == ours.Asymmetric else (1, 2, 8, 16):
                    x = (torch.randn(parts * 8, size, generator=generator)).half().to(DEVICE)
                    levels, params = theirs.quantize(
                        x, parts * 8, bits, theirs.QuantizationType(int(kind))
                    )
                    args = (levels.view(-1), params, parts * 8)
                    for out in (8, 4):
                        same("quantized_reduction", *args, out, bits, kind, parts)
        levels = torch.randint(0, 256, (64, 128), generator=generator, dtype=torch.uint8)
        scales = torch.rand(64, generator=generator).half() * 30 + 0.01
        least = torch.randn(64, generator=generator).half()
        given = [each.to(DEVICE) for each in (levels, scales, least)]
        same(f"dequantize_int{bits}_to_half_experimental", *given, 64, 128 * 8 // bits)
    return f"engine, {took:.1f} s; {compared} levels, scales and numbers"


def check_own_sources_of_fp_quantizer_are_built_by_the_engine() -> str:
    """Its number formats are DeepSpeed's own (fp8 to 480, fp12 as e7m4): no op of opkiln's."""
    installed()
    from types import SimpleNamespace

    from deepspeed.ops.fp_quantizer import FP_Quantize

    begin = time.perf_counter()
    try:
        quantizer = FP_Quantize(SimpleNamespace(group_size=512))
    except CompileError as error:  # of 0.19.8, nvcc 13 refuses a name that is declared twice
        raise Skipped(f"{error.what}: {error.why.splitlines()[0].partition(': ')[2]}") from error
    took = time.perf_counter() - begin
    x = torch.randn(64, 512, device=DEVICE, dtype=torch.bfloat16)
    errors = []
    for bits, bound in ((8, 0.05), (12, 0.03), (6, 0.2)):
        back = quantizer.dequantize(quantizer.quantize(x, q_bits=bits), q_bits=bits)
        errors.append(((back.float() - x.float()).abs().mean() / x.float().abs().mean()).item())
        assert errors[-1] < bound, (bits, errors)
    assert on_opkiln.served()["fp_quantizer"].origin == "engine"
    return f"engine, {took:.1f} s; mean errors " + ", ".join(f"{each:.2%}" for each in errors)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
