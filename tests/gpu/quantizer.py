"""quantizer on a GPU: one line per check. Needs torch and nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/quantizer.py [--only WORD]

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import io
import itertools
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from checks import Skipped, main, refusal
from sample.references import references
from torch import Tensor

import opkiln
from opkiln import quant

if TYPE_CHECKING:
    from collections.abc import Sequence

reference = references("quantizer")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
FORMATS = list(itertools.product((8, 4), (True, False)))
LAID = (1, 1, 1)
# Sizes and groups: every way of laying groups over threads, with and without a shorter last one.
SHAPES = (
    (0, 16), (1, 16), (7, 16), (4095, 16), (4096, 24), (4095, 64), (100_003, 256), (100_003, 264),
    (65_536, 512), (100_003, 1000), (100_003, 1024), (1 << 20, 2048), (100_003, 2048),
    (100_003, 4096), (300_007, 8192), (300_007, 16_384), (300_007, 32_768), (300_007, 40_000),
    (1 << 20, 65_536), (300_007, 65_536), (5000, 65_536),
)  # fmt: skip


def native() -> Any:
    return opkiln.get_builder("quantizer").jit_load()


def numbers(count: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).to("cuda", dtype)


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """The same bits, but for those of NaN."""
    return all(
        a.dtype == b.dtype and torch.equal(a, b)
        if not a.is_floating_point()
        else a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=-7e7), b.nan_to_num(nan=-7e7))
        for a, b in zip(ours, theirs, strict=True)
    )


def check_it_builds_for_this_gpu_and_serves() -> str:
    began = time.perf_counter()
    builder = opkiln.get_builder("quantizer")
    builder.jit_load()
    seconds = time.perf_counter() - began
    assert builder.backend == "cuda", builder.backend
    assert torch._C._dispatch_has_kernel_for_dispatch_key("opkiln::quantize", "CUDA")
    return f"loaded in {seconds:.2f} s"


def check_levels_are_the_references_bit_for_bit() -> str:
    made = 0
    for dtype, (count, group) in itertools.product(DTYPES, SHAPES):
        x = numbers(count, dtype)
        if count > 40:
            x[17], x[33] = math.nan, math.inf
        for (bits, symmetric), stochastic in itertools.product(FORMATS, (False, True)):
            args = (bits, group, symmetric, stochastic, -3, 2**40 + 1)
            ours, theirs = native().quantize(x, *args, *LAID), reference.quantize(x, *args, *LAID)
            assert same(ours, theirs), (dtype, count, group, args)
            back = (*theirs, count, dtype, bits, group, symmetric, *LAID)
            assert same([native().dequantize(*back)], [reference.dequantize(*back)]), back[3:]
            expected = reference.fake_quantize(x, *args)
            assert same([native().fake_quantize(x, *args)], [expected]), (dtype, count, args)
            inside = x.clone()
            native().fake_quantize_(inside, *args)
            assert same([inside], [expected]), (dtype, count, args)
            made += 4
    return f"{made} calls"


def check_the_full_range_is_the_references_bit_for_bit() -> str:
    made = 0
    for dtype, (count, group), bits, stochastic in itertools.product(
        DTYPES, SHAPES, (8, 4), (False, True)
    ):
        x = numbers(count, dtype)
        if count > 40:
            x[17], x[33] = math.nan, math.inf
        args, full = (bits, group, True, stochastic, -3, 2**40 + 1), (None, False)
        ours = native().quantize(x, *args, *LAID, *full)
        theirs = reference.quantize(x, *args, *LAID, *full)
        assert same(ours, theirs), (dtype, count, group, args)
        expected = reference.fake_quantize(x, *args, *full)
        assert same([native().fake_quantize(x, *args, *full)], [expected]), (dtype, count, args)
        error, other = numbers(count, seed=1) * 0.01, numbers(count, seed=1) * 0.01
        ours = native().quantize_with_feedback(x, error, *args, *LAID, *full)
        theirs = reference.quantize_with_feedback(x, other, *args, *LAID, *full)
        assert same((*ours, error), (*theirs, other)), (dtype, count, args)
        made += 3
    return f"{made} calls"


def check_the_full_range_is_nearer_at_4_bits() -> str:
    x = numbers(1 << 22)
    found = []
    for group in (64, 2048):
        narrow, full = (
            float((quant.fake_quantize(x, bits=4, group_size=group, narrow_range=each) - x).norm())
            for each in (True, False)
        )
        assert full < 0.97 * narrow
        found.append(f"{1 - full / narrow:.1%} in groups of {group}")
    return ", ".join(found)


def check_quantized_tensors_are_saved_loaded_and_moved() -> None:
    q = quant.quantize(numbers(5000, F16), bits=4, group_size=64, symmetric=False)
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    there = torch.load(file, map_location="cpu")
    assert there.device.type == "cpu"
    here = there.pin_memory().to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert same([quant.dequantize(here)], [quant.dequantize(q)])
    assert same([quant.dequantize(q.cpu().cuda())], [quant.dequantize(q)])


def check_the_gpu_and_the_cpu_agree_bit_for_bit() -> None:
    for dtype, (bits, symmetric) in itertools.product(DTYPES, FORMATS):
        x = numbers(70_001, dtype)
        rest = {
            "bits": bits, "group_size": 136, "symmetric": symmetric, "stochastic": True, "seed": 5,
        }  # fmt: skip
        here, there = quant.quantize(x, **rest), quant.quantize(x.cpu(), **rest)
        assert torch.equal(here.values.cpu(), there.values)
        assert torch.equal(here.scales.cpu(), there.scales)
        assert torch.equal(quant.dequantize(here).cpu(), quant.dequantize(there))


def check_views_at_odd_addresses_and_their_neighbours() -> None:
    for dtype, start, (bits, symmetric) in itertools.product(DTYPES, (1, 2, 3, 4, 7), FORMATS):
        whole = numbers(9000, dtype)
        view = whole[start : start + 5003]
        for group in (16, 2048):
            args = (bits, group, symmetric, True, 1, 2)
            ours = native().quantize(view, *args, *LAID)
            assert same(ours, reference.quantize(view, *args, *LAID))
            # Levels at odd addresses, too.
            room = torch.zeros(ours[0].numel() + start, dtype=ours[0].dtype, device="cuda")
            room[start:] = ours[0]
            back = native().dequantize(
                room[start:], *ours[1:], 5003, dtype, bits, group, symmetric, *LAID
            )
            assert same([back], [reference.fake_quantize(view, *args)])
            kept = whole.clone()
            part = kept[start : start + 5003]
            native().fake_quantize_(part, *args)
            assert same([part], [reference.fake_quantize(view, *args)])
            assert same([kept[:start]], [whole[:start]])
            assert same([kept[start + 5003 :]], [whole[start + 5003 :]])


def check_swizzled_groups_lie_where_the_reference_has_them() -> None:
    for (nodes, devices, pipeline), group in itertools.product(
        ((2, 4, 1), (3, 2, 5), (1, 8, 2)), (16, 512)
    ):
        x = numbers(nodes * devices * pipeline * group * 3, F16)
        for bits, symmetric in FORMATS:
            args = (bits, group, symmetric, False, 0, 0, nodes, devices, pipeline)
            ours = native().quantize(x, *args)
            assert same(ours, reference.quantize(x, *args))
            rest = (x.numel(), F16, bits, group, symmetric, nodes, devices, pipeline)
            plain = native().fake_quantize(x, bits, group, symmetric, False, 0, 0)
            assert same([native().dequantize(*ours, *rest)], [plain])


def check_feedback_and_reductions_are_the_references_bit_for_bit() -> None:
    for dtype, (bits, symmetric), (count, group) in itertools.product(
        DTYPES, FORMATS, ((7, 16), (4095, 64), (100_003, 2048), (200_001, 65_536))
    ):
        x, error = numbers(count, dtype), numbers(count, seed=1) * 0.01
        other = error.clone()
        args = (bits, group, symmetric, True, 3, 4)
        ours = native().quantize_with_feedback(x, error, *args, *LAID)
        theirs = reference.quantize_with_feedback(x, other, *args, *LAID)
        assert same((*ours, error), (*theirs, other)), (dtype, count, args)
    for (bits, symmetric), (to_bits, to_symmetric), ranks in itertools.product(
        FORMATS, FORMATS, (1, 3, 8)
    ):
        for count, group, to_group in ((7, 16, 16), (100_003, 24, 2048), (200_001, 512, 65_536)):
            parts = [
                reference.quantize(
                    numbers(count, seed=i), bits, group, symmetric, False, 0, 0, *LAID
                )
                for i in range(ranks)
            ]
            lists = [list(row) for row in zip(*parts, strict=True)]
            if symmetric:
                lists[2] = []
            wanted = (to_bits, to_group, to_symmetric, True, 3, 4)
            rest = (count, bits, group, symmetric, 1 / ranks, *wanted)
            ours, theirs = (m.quantized_reduce(*lists, *rest) for m in (native(), reference))
            assert same(ours, theirs), rest
            error = numbers(count, seed=9) * 0.01
            other = error.clone()
            ours = native().quantized_reduce_with_feedback(error, *lists, *rest)
            theirs = reference.quantized_reduce_with_feedback(other, *lists, *rest)
            assert same((*ours, error), (*theirs, other)), rest


def check_stochastic_rounding_is_unbiased_within_4_sigma() -> str:
    worst = 0.0
    for part in (0.1, 0.5, 0.9):
        count = 1 << 26
        x = torch.full((count,), 3 + part, device="cuda")
        x[::2048] = 127.0  # so that the scale is 1
        x = quant.fake_quantize(x, stochastic=True, seed=1)
        kept = x.view(-1, 2048)[:, 1:].double()
        sigma = math.sqrt(part * (1 - part) / kept.numel())
        worst = max(worst, abs(float(kept.mean()) - 3 - part) / sigma)
    assert worst < 4, worst
    return f"{worst:.1f} sigma"


def check_more_than_2_to_the_31_elements() -> str:
    count = 2**31 + 3
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        raise Skipped("the GPU has less than 40 GiB of memory")
    x = torch.full((count,), 0.25, dtype=F16, device="cuda")
    x[::4096] = 1.0
    x[-3:] = torch.tensor([0.5, -0.5, 2.0], device="cuda", dtype=F16)
    for bits in (8, 4):
        q = quant.quantize(x, bits=bits, group_size=4096, stochastic=True, seed=3)
        back = quant.dequantize(q)
        step = 1 / (2 ** (bits - 1) - 1)
        assert float((back[:-3] - x[:-3]).abs().max()) <= step
        assert float(q.scales[:-1].min()) == float(q.scales[:-1].max())
        assert float(back[-1]) == 2.0
        del back
        start = 2**31 - 4096
        # The random bits of the element before 2**31 and of those before it, one by one.
        words = reference.philox(torch.arange(start // 16, start // 16 + 256, device="cuda"), 0, 3)
        fours = [(w >> 8 * i | w << 32 - 8 * i) & 0xFFFF for w in words for i in range(4)]
        u = torch.stack(fours, 1).view(-1).float() * 2.0**-16 + 128
        part = x[start : start + 4096].float()
        scale = q.scales[start // 4096]
        inverse = scale.reciprocal()
        inverse = inverse * (1 - 2.0**-21) if part.amax() * inverse > 1 / step else inverse
        levels = (part * inverse + u).floor() - 128
        found = quant.dequantize(q)[start : start + 4096]
        assert torch.equal(found, (levels * scale).to(F16))
        del q, found
    return f"{count} elements"


def check_it_runs_on_the_current_stream() -> None:
    x = numbers(1 << 20, F16)
    before = native().quantize(x, 8, 2048, True, False, 0, 0, *LAID)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    x.clone().mul_(2.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        x.mul_(2.0)
        after = native().quantize(x, 8, 2048, True, False, 0, 0, *LAID)
        done.record()
    torch.cuda.default_stream().synchronize()
    assert not done.query(), "the side stream was not busy long enough to tell"
    side.synchronize()
    assert torch.equal(after[1], before[1] * 2)
    assert torch.equal(after[0], before[0])


def check_many_streams_at_once() -> None:
    tensors = [numbers(300_007, F16, seed=i) for i in range(8)]
    args = (4, 512, False, True, 1, 0, *LAID)
    expected = [native().quantize(x, *args) for x in tensors]
    streams = [torch.cuda.Stream() for _ in tensors]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for x, stream in zip(tensors, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(native().quantize(x, *args))
        torch.cuda.synchronize()
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def check_a_captured_call_follows_its_input_and_offset() -> None:
    x = numbers(100_003, F16)
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    quant.fake_quantize(x, stochastic=True, seed=2, offset=offset)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quant.fake_quantize(x, stochastic=True, seed=2, offset=offset)
    for step in range(4):
        x.copy_(numbers(100_003, F16, seed=step))
        offset.fill_(step * 2**33)
        graph.replay()
        expected = reference.fake_quantize(x, 8, 2048, True, True, 2, step * 2**33)
        assert torch.equal(out, expected)


def check_a_call_never_waits_for_the_gpu() -> None:
    x = numbers(100_003, F16)
    error = torch.zeros(100_003, device="cuda")
    q = quant.quantize(x, error=error)
    quant.quantized_reduce([q, q], error=error)
    torch.cuda.set_sync_debug_mode("error")
    try:
        q = quant.quantize(x, error=error)
        quant.dequantize(quant.quantized_reduce([q, q], error=error))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled_as_eager(backend: str) -> None:
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        q = quant.quantize(x * 2, bits=4, group_size=64, stochastic=True, seed=1)
        return quant.dequantize(q) + 1, quant.fake_quantize(x, group_size=64)

    x = numbers(5000, BF16)
    expected = call(x)
    got = torch.compile(call, fullgraph=True, backend=backend)(x)
    assert same(got, expected)


def check_it_compiles_into_one_graph() -> None:
    compiled_as_eager("aot_eager")


def check_inductor_compiles_it_into_one_graph() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise Skipped(f"inductor needs triton: {error}") from error
    compiled_as_eager("inductor")


def check_opcheck_finds_nothing() -> None:
    x, error = numbers(100, BF16), torch.zeros(100, device="cuda")
    op = native()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    format_ = (8, 16, True, False, 0, 0)
    torch.library.opcheck(op.quantize, (x, *format_, *LAID), test_utils=tests)
    torch.library.opcheck(op.quantize_with_feedback, (x, error, *format_, *LAID), test_utils=tests)
    torch.library.opcheck(op.fake_quantize, (x.float().requires_grad_(), *format_))
    torch.library.opcheck(op.fake_quantize_, (x, *format_), test_utils=tests)
    three = op.quantize(x, *format_, *LAID)
    torch.library.opcheck(op.dequantize, (*three, 100, F16, 8, 16, True, *LAID), test_utils=tests)


def check_the_gradient_goes_straight_through() -> None:
    x = numbers(1000).requires_grad_()
    (quant.fake_quantize(x, bits=4, group_size=40) * numbers(1000, seed=1)).sum().backward()
    assert torch.equal(x.grad, numbers(1000, seed=1))


def check_wrong_tensors_are_refused_by_name() -> None:
    x = numbers(64, F16)
    said = {
        "x has dtype float64": lambda: quant.quantize(x.double()),
        "group_size is 131072": lambda: quant.quantize(x, group_size=131_072),
        "bits is 3": lambda: quant.quantize(x, bits=3),
        "error is not on cuda:0": lambda: quant.quantize(x, error=torch.zeros(64)),
        "offset_tensor is not on cuda:0": lambda: quant.quantize(x, offset=torch.tensor(0)),
        "scales is not on cuda:0": lambda: quant.dequantize(
            quant.quantize(x)._replace(scales=torch.ones(1))
        ),
    }
    for text, call in said.items():
        assert text in refusal(call), (text, refusal(call))
    assert "x is not contiguous" in refusal(
        lambda: native().quantize(x.view(8, 8).t(), 8, 16, True, False, 0, 0, *LAID)
    )


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
