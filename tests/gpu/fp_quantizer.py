"""fp_quantizer on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/fp_quantizer.py [--only WORD]

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import torch
from checks import Skipped, main, refusal
from sample.references import references
from torch import Tensor

import opkiln
from opkiln.ops.fp_quantizer import functions as formats
from opkiln.quant import FPQuantizer

reference = references("fp_quantizer")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = [(each.bits, each.mantissa_bits) for each in formats.FORMATS.values()]
SIZES = (0, 1, 7, 16, 4095, 100_003)
GROUPS = (16, 48, 64, 512, 528, 2048, 8192, 10_000, 65_536)


def native() -> Any:
    return opkiln.get_builder("fp_quantizer").jit_load()


def sample(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of many magnitudes, on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    wide = torch.randn(count, generator=generator, device="cuda").mul_(2).exp_()
    return torch.randn(count, generator=generator, device="cuda").mul_(wide).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but any NaN is any other."""
    if a.is_floating_point():
        return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())
    return torch.equal(a, b)


def same_pair(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    return same(ours[0], theirs[0]) and same(ours[1], theirs[1])


def check_it_builds_for_this_gpu_and_serves() -> str:
    began = time.perf_counter()
    builder = opkiln.get_builder("fp_quantizer")
    builder.jit_load()
    seconds = time.perf_counter() - began
    assert builder.backend == "cuda", builder.backend
    for name in ("fp_quantize", "fp_dequantize", "fp_dequantize_rows"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"opkiln::{name}", "CUDA")
    return f"loaded in {seconds:.2f} s"


def check_codes_and_scales_are_the_references_bit_for_bit() -> str:
    count = 0
    for form in FORMATS:
        for dtype in DTYPES:
            for group in GROUPS:
                for size in SIZES:
                    x = sample(size, dtype, count)
                    for stochastic in (False, True):
                        args = (x, group, *form, stochastic, 11, 5)
                        ours, theirs = native().fp_quantize(*args), reference.fp_quantize(*args)
                        where = (form, dtype, group, size, stochastic)
                        assert same_pair(ours, theirs), where
                        count += 1
    return f"{count} mixes"


def check_every_finite_half_of_every_scale_is_encoded_as_by_the_reference() -> None:
    bits = torch.arange(0x7C00, dtype=torch.int32, device="cuda").to(torch.int16)
    halves = bits.view(torch.float16)
    for form in FORMATS:
        for factor in (1.0, 3.0, 1e-3, 1e30, 1e-38, 1e-42):
            x = torch.stack((halves.float() * factor, -halves.float() * factor), dim=1)
            for group in (16, 65536):
                ours, theirs = (
                    ops.fp_quantize(x, group, *form) for ops in (native(), reference)
                )  # fmt: skip
                assert same_pair(ours, theirs), (form, factor, group)


def check_numbers_of_all_codes_are_the_references() -> None:
    for form in FORMATS:
        bits = form[0]
        codes = torch.randint(256, (3 * 65536,), dtype=torch.uint8, device="cuda")
        codes[:256] = torch.arange(256, device="cuda").to(torch.uint8)
        count = codes.numel() * 8 // bits
        for group in (64, 48, 1024):
            scales = torch.rand(-(-count // group), device="cuda").exp()
            for dtype in DTYPES:
                args = (codes, scales, [count], group, *form, dtype)
                ours, theirs = (ops.fp_dequantize(*args) for ops in (native(), reference))
                assert same(ours, theirs), (form, group, dtype)


def check_rows_are_those_of_the_whole() -> None:
    for form in FORMATS:
        for size in ([37, 64], [9, 33], [5, 3, 7], [4, 4096]):
            x = sample(math.prod(size), torch.bfloat16).view(size)
            codes, scales = native().fp_quantize(x, 48, *form)
            rows = torch.tensor([2, 0, 2, 3], device="cuda")
            for dtype in DTYPES:
                whole = native().fp_dequantize(codes, scales, size, 48, *form, dtype)
                part = native().fp_dequantize_rows(codes, scales, rows, size, 48, *form, dtype)
                assert same(part, whole[rows]), (form, size, dtype)
            odd = torch.tensor([1, -1, size[0], 1 << 40], device="cuda")
            part = native().fp_dequantize_rows(codes, scales, odd, size, 48, *form, torch.float32)
            assert not part[0].isnan().any()
            assert part[1:].isnan().all()


def check_nan_and_infinity_make_their_group_nan_and_no_other() -> None:
    for form in FORMATS:
        for dtype in DTYPES:
            for odd in (math.nan, math.inf, -math.inf):
                for group in (16, 48, 512, 16384):
                    x = sample(3 * group, dtype)
                    x[group + 5] = odd
                    args = (x, group, *form)
                    codes, scales = native().fp_quantize(*args)
                    theirs = reference.fp_quantize(*args)
                    assert same_pair((codes, scales), theirs)
                    assert scales.isnan().tolist() == [False, True, False]


def check_views_at_odd_addresses_are_read_as_they_are() -> None:
    for form in FORMATS:
        for dtype in DTYPES:
            whole = sample(10_001, dtype)
            for start in (1, 2, 3, 5, 8):
                x = whole[start:]
                ours = native().fp_quantize(x, 128, *form)
                theirs = native().fp_quantize(x.clone(), 128, *form)
                assert same_pair(ours, theirs)
                shifted = torch.empty(ours[0].numel() + start, dtype=torch.uint8, device="cuda")
                shifted[start:] = ours[0]
                back = (
                    native().fp_dequantize(codes, ours[1], [x.numel()], 128, *form, dtype)
                    for codes in (ours[0], shifted[start:])
                )
                assert same(*back)
    strided = sample(4096, torch.float32).view(64, 64).t()
    ours, theirs = (
        native().fp_quantize(x, 64, 8, 3) for x in (strided, strided.contiguous())
    )  # fmt: skip
    assert same_pair(ours, theirs)


def check_more_than_2_to_the_31_elements() -> None:
    count = (1 << 31) + 3
    x = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    piece = sample(1 << 20, torch.bfloat16)
    for start in range(0, count, piece.numel()):
        x[start : start + piece.numel()] = piece[: count - start]
    for form in FORMATS:
        for stochastic in (False, True):
            codes, scales = native().fp_quantize(x, 512, *form, stochastic, 3, 4)
            tail = 8192 + 3  # from a group's start to the end
            start = (count - tail) // 512 * 512
            if not stochastic:
                theirs = reference.fp_quantize(x[start:], 512, *form)
                assert torch.equal(codes[start * form[0] // 8 :], theirs[0])
                assert torch.equal(scales[start // 512 :], theirs[1])
            back = native().fp_dequantize(codes, scales, [count], 512, *form, torch.bfloat16)
            for low in (0, (1 << 30) - 512, (1 << 31) - 1024, start):
                high = min(low + 2048, count)
                theirs = reference.fp_dequantize(
                    codes[low * form[0] // 8 : -(-high * form[0] // 8)],
                    scales[low // 512 : -(-high // 512)], [high - low], 512, *form, torch.bfloat16,
                )  # fmt: skip
                assert same(back[low:high], theirs), (form, low)
            del codes, scales, back
    rows = torch.tensor([(1 << 27) - 1, 0], device="cuda")
    codes, scales = native().fp_quantize(x[: 1 << 31], 512, 6, 2)
    part = native().fp_dequantize_rows(codes, scales, rows, [1 << 27, 16], 512, 6, 2, torch.float32)
    last = reference.fp_quantize(x[(1 << 31) - 512 : 1 << 31], 512, 6, 2)
    assert same(part[0], reference.fp_dequantize(*last, [512], 512, 6, 2, torch.float32)[-16:])


def check_stochastic_rounding_is_unbiased() -> str:
    worst = 0.0
    count = 1 << 20
    for form in formats.FORMATS.values():
        for value in (0.3, 0.7, 1e-3):
            x = torch.full((count,), value, device="cuda")
            x[::16] = 1.0  # the largest of its group
            codes, scales = native().fp_quantize(x, 16, form.bits, form.mantissa_bits, True, 7)
            back = native().fp_dequantize(
                codes, scales, [count], 16, form.bits, form.mantissa_bits, torch.float32
            )
            kept = back.view(-1, 16)[:, 1:].double()
            low, high = kept.min(), kept.max()
            if low == high:
                assert abs(float(low) - value) < 1e-6 * value
                continue
            assert low <= value <= high
            deviation = (high - low) / 2 / math.sqrt(kept.numel())
            worst = max(worst, float((kept.mean() - value).abs() / deviation))
            again = native().fp_quantize(x, 16, form.bits, form.mantissa_bits, True, 7)
            other = native().fp_quantize(x, 16, form.bits, form.mantissa_bits, True, 7, 1)
            assert torch.equal(again[0], codes)
            assert not torch.equal(other[0], codes)
    assert worst < 4
    return f"at most {worst:.1f} sigma off"


def check_side_streams_and_their_order() -> None:
    quantizer = FPQuantizer("e4m3", group_size=512)
    x = sample(1 << 22, torch.bfloat16)
    expected = quantizer.quantize(x)
    streams = [torch.cuda.Stream() for _ in range(8)]
    found = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = x.clone()
            late.zero_()
            torch.cuda._sleep(1_000_000)
            late.copy_(x)
            packed = quantizer.quantize(late)
            found.append((packed, quantizer.dequantize(packed)))
    torch.cuda.synchronize()
    for packed, back in found:
        assert same_pair(packed[:2], expected[:2])
        assert same(back, quantizer.dequantize(expected))


def check_a_captured_graph_follows_its_inputs() -> None:
    x = sample(100_000, torch.float16)
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    ops = native()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            codes, scales = ops.fp_quantize(x, 512, 6, 2, True, 3, 0, offset)
            back = ops.fp_dequantize(codes, scales, [x.numel()], 512, 6, 2, torch.float16)
    for step in range(3):
        x.copy_(sample(x.numel(), torch.float16, step))
        offset.fill_(step)
        graph.replay()
        expected = reference.fp_quantize(x, 512, 6, 2, True, 3, step)
        assert same_pair((codes, scales), expected)
        assert same(back, reference.fp_dequantize(*expected, [x.numel()], 512, 6, 2, torch.float16))


def check_it_never_waits_for_the_gpu() -> None:
    x, rows = sample(4096, torch.float32).view(8, 512), torch.tensor([3, 1], device="cuda")
    quantizer = FPQuantizer("e2m1")
    quantizer.selective_dequantize(quantizer.quantize(x, stochastic=True), rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = quantizer.quantize(x, stochastic=True)
        quantizer.dequantize(packed)
        quantizer.selective_dequantize(packed, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_as_eager(backend: str) -> None:
    quantizer = FPQuantizer("e3m2", group_size=64)

    def round_trip(x: Tensor) -> Tensor:
        return quantizer.dequantize(quantizer.quantize(x * 2)) + 1

    x = sample(1000, torch.bfloat16)
    expected = round_trip(x)
    assert same(torch.compile(round_trip, fullgraph=True, backend=backend)(x), expected)


def check_it_compiles_into_one_graph() -> None:
    compiled_as_eager("aot_eager")


def check_inductor_compiles_it_into_one_graph() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise Skipped(f"inductor needs triton: {error}") from error
    compiled_as_eager("inductor")


def check_opcheck_finds_nothing() -> None:
    ops, x = native(), sample(1000, torch.float16)
    torch.library.opcheck(ops.fp_quantize, (x, 64, 6, 2, True, 1, 2))
    codes, scales = ops.fp_quantize(x, 64, 6, 2)
    torch.library.opcheck(ops.fp_dequantize, (codes, scales, [10, 100], 64, 6, 2, torch.float16))
    rows = torch.tensor([1, 5], device="cuda")
    torch.library.opcheck(
        ops.fp_dequantize_rows, (codes, scales, rows, [10, 100], 64, 6, 2, torch.float16)
    )


def check_wrong_tensors_are_refused_by_name() -> None:
    ops, x = native(), sample(64, torch.float32)
    codes, scales = ops.fp_quantize(x, 16, 8, 3)
    rest = ([64], 16, 8, 3, torch.float32)
    for message, call in {
        "x has dtype float64": lambda: ops.fp_quantize(x.double(), 16, 8, 3),
        "group_size is 24": lambda: ops.fp_quantize(x, 24, 8, 3),
        "bits is 7": lambda: ops.fp_quantize(x, 16, 7, 3),
        "offset_tensor is not on cuda:0": lambda: ops.fp_quantize(
            x, 16, 8, 3, True, 0, 0, torch.zeros(1, dtype=torch.int64)
        ),
        "scales is not on cuda:0": lambda: ops.fp_dequantize(codes, scales.cpu(), *rest),
        "codes has 63 elements, expected 64": lambda: ops.fp_dequantize(codes[1:], scales, *rest),
        "scales has 3 elements, expected 4": lambda: ops.fp_dequantize(codes, scales[1:], *rest),
        "rows is not on cuda:0": lambda: ops.fp_dequantize_rows(
            codes, scales, torch.zeros(1, dtype=torch.int64), *rest
        ),
    }.items():
        said = refusal(call)
        assert message in said, said


CHECKS = [
    value for name, value in list(globals().items()) if name.startswith("check_")
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
