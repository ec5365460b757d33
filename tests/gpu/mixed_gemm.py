"""Products with packed weights and of experts' tokens on a GPU: one line per check. Needs torch and
nvcc, and no pytest.

    PYTHONPATH=src python tests/gpu/mixed_gemm.py

The exit code is 0 when every check passed or says why it could not be made, otherwise 1.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from checks import main

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from mixed_gemm_cases import CASES, Case, check, make

from opkiln import quant
from opkiln.nn import inference
from opkiln.ops.mixed_gemm.functions import packed_gemm
from opkiln.ops.mixed_gemm.op import FORMATS

NAMES = {torch.float16: "half", torch.bfloat16: "bfloat16"}
KERNELS = [(form, dtype) for form in FORMATS for dtype in NAMES]
LARGE = [
    Case(1, 4096, 4096),
    Case(8, 1000, 11008, bias=True, activation="gelu"),
    Case(16, 1024, 4096, groups=16),
    Case(32, 512, 4096, bias=True),
    Case(64, 128, 2048, ends=tuple(range(1, 65)), bias=True, activation="silu"),
    Case(100, 256, 1024, ends=(0, 0, 90, 90, 91, 100, 100, 100), groups=4),
]


def check_kernels_build_for_this_gpu() -> None:
    def load(kernel: Any) -> bool:
        form, dtype = kernel
        return packed_gemm.load("cuda", CODES=form.kind, T=NAMES[dtype])

    with ThreadPoolExecutor() as pool:
        assert all(pool.map(load, KERNELS))


def check_every_format_is_within_rounding_of_float64() -> None:
    for form, dtype in KERNELS:
        for case in (*CASES, *LARGE) if dtype == torch.bfloat16 else CASES:
            check(case, form.name, dtype, packed_gemm, "cuda")


def check_every_code_is_decoded() -> None:
    for form, dtype in KERNELS[2:8]:  # int8, int4, e3m2
        call, _ = make(Case(1, 16, 256), form.name, dtype, "cuda")
        assert call.scales is not None
        codes = torch.randint(0, 256, call.codes.shape, dtype=torch.uint8, device="cuda")
        call = call._replace(
            codes=codes.view(call.codes.dtype),
            scales=torch.ones_like(call.scales),
            x=torch.eye(256, dtype=dtype, device="cuda"),
        )
        assert torch.equal(packed_gemm(*call), packed_gemm.reference(*call)), (form, dtype)


def check_a_result_is_the_same_to_the_bit_each_time() -> None:
    call, _ = make(LARGE[2], "e3m2", torch.bfloat16, "cuda")
    first = packed_gemm(*call)
    assert all(torch.equal(first, packed_gemm(*call)) for _ in range(50))


def _close(got: torch.Tensor, exact: torch.Tensor) -> None:
    unit = 8e-3 if got.dtype == torch.bfloat16 else 1e-3
    size = exact.abs().max().item()
    torch.testing.assert_close(got.double(), exact, rtol=unit, atol=unit * size)


def check_many_rows_are_dequantized_and_give_the_same() -> None:
    weight = torch.randn(256, 1024, device="cuda") / 32
    quantizer = quant.FPQuantizer("e3m2", group_size=1024)
    packed = quantizer.quantize(weight)
    made: list[Any] = [packed, *(quant.quantize(weight, bits=b, group_size=256) for b in (8, 4))]
    wide = [quantizer.dequantize(packed), *map(quant.dequantize, made[1:])]
    for dtype in (*NAMES, torch.float32):
        for rows in (0, 1, 32, 33, 500):
            x = torch.randn(rows, 1024, device="cuda").to(dtype)
            for each, w in zip(made, wide, strict=True):
                got = inference.mixed_gemm(x, each)
                if rows:
                    _close(got, x.double() @ w.double().T)


def check_rows_are_multiplied_with_their_experts_matrix() -> None:
    for dtype in (*NAMES, torch.float32):
        for rows, outputs, inputs in (
            (0, 64, 64),
            (7, 64, 64),
            (40, 33, 72),
            (900, 128, 256),
            (9, 5, 7),
        ):
            w = torch.randn(4, outputs, inputs, device="cuda").to(dtype)
            x = torch.randn(rows, inputs, device="cuda").to(dtype)
            bias = torch.randn(4, outputs, device="cuda").to(dtype)
            ends = [0, rows // 3, rows // 3, rows]
            offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
            got = inference.moe_gemm(x, w, offsets, bias)
            parts = [
                x[a:b].double() @ w[e].double().T + bias[e].double()
                for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False))
            ]
            if rows:
                _close(got, torch.cat(parts))
    q = quant.quantize(torch.randn(4, 128, 256, device="cuda"), group_size=256)
    wide = quant.dequantize(q).double()
    for dtype in NAMES:
        for rows in (7, 900):
            x = torch.randn(rows, 256, device="cuda").to(dtype)
            offsets = torch.tensor([1, 1, 4, rows], dtype=torch.int32, device="cuda")
            got = inference.mixed_moe_gemm(x, q, offsets)
            _close(got[4:], x[4:].double() @ wide[3].T)
            _close(got[1:4], x[1:4].double() @ wide[2].T)


def check_it_runs_on_the_current_stream_and_in_a_graph() -> None:
    weight = quant.FPQuantizer("e3m2", group_size=512).quantize(torch.randn(64, 512, device="cuda"))
    wide = quant.FPQuantizer("e3m2", group_size=512).dequantize(weight).double()
    experts = torch.randn(3, 64, 512, device="cuda").half()
    x = torch.randn(5, 512, device="cuda").half()
    offsets = torch.tensor([2, 3, 5], dtype=torch.int32, device="cuda")
    inference.mixed_gemm(x, weight)
    inference.moe_gemm(x, experts, offsets)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.neg_()
        out = inference.mixed_gemm(x, weight)
    side.synchronize()
    _close(out, x.double() @ wide.T)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, of_experts = inference.mixed_gemm(x, weight), inference.moe_gemm(x, experts, offsets)
    for ends in ([2, 3, 5], [0, 0, 5], [5, 5, 5]):
        x.copy_(torch.randn(5, 512))
        offsets.copy_(torch.tensor(ends))
        graph.replay()
        _close(out, x.double() @ wide.T)
        chosen = [sum(row >= end for end in ends) for row in range(5)]
        _close(of_experts, torch.einsum("ri,roi->ro", x.double(), experts[chosen].double()))


def check_opcheck_finds_nothing_and_it_compiles() -> None:
    call, _ = make(CASES[5], "int8", torch.bfloat16, "cuda")
    torch.library.opcheck(torch.ops.opkiln.packed_gemm.default, tuple(call))
    weight = quant.quantize(torch.randn(64, 512, device="cuda"), group_size=512)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return inference.mixed_gemm(x * 2, weight, activation="silu") + 1

    x = torch.randn(4, 512, device="cuda").bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


if __name__ == "__main__":
    sys.exit(main(CHECKS, __doc__))
