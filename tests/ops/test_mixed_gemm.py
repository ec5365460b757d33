"""Products with packed weights: the kernel in the emulator against float64, and the front end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from mixed_gemm_cases import CASES, Case, check, expected, make
from torch import Tensor
from torch.nn import functional

from opkiln import quant
from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import FallbackWarning, UsageError
from opkiln.loading import loader
from opkiln.nn import core, inference
from opkiln.ops.mixed_gemm.functions import packed_gemm
from opkiln.ops.mixed_gemm.gemm import fits
from opkiln.ops.mixed_gemm.op import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = {each.name: each.kind for each in FORMATS}
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "half"}
# Formats decode into both types; bfloat16 of one in every run.
KERNELS = [
    ("e3m2", torch.bfloat16),
    *((form, torch.float16) for form in ("e3m2", "int8", "int4", "e4m3", "plain")),
    *(pytest.param(form, torch.bfloat16, marks=pytest.mark.full) for form in ("int8", "int4")),
]


EACH_DTYPE = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.full)],
    ids=str,
)


@pytest.fixture(scope="module")
def emulated() -> Iterator[Any]:
    """The op, whose kernels the emulator runs on CPU tensors."""
    loader.forget_references()  # other tests may have found no native version
    packed_gemm.builder.EMULATE = True
    yield packed_gemm
    packed_gemm.builder.EMULATE = False


@pytest.mark.parametrize(("form", "dtype"), KERNELS)
def test_the_kernel_is_within_rounding_of_float64(
    emulated: Any, form: str, dtype: torch.dtype, whole_grid: bool
) -> None:
    assert emulated.load("cpu", CODES=KINDS[form], T=NAMES[dtype])
    # The kernel's two forms, groups, ends and experts are the same for all formats and dtypes.
    every = whole_grid or (form, dtype) == ("e3m2", torch.bfloat16)
    for case in CASES if every else (CASES[1], CASES[4], CASES[6]):
        check(case, form, dtype, emulated)


def test_every_code_is_decoded(emulated: Any) -> None:
    for form in ("e3m2", "int8", "int4"):
        call, _ = make(Case(1, 16, 256), form, torch.float16)
        assert call.scales is not None
        codes = torch.randint(0, 256, call.codes.shape, dtype=torch.uint8).view(call.codes.dtype)
        call = call._replace(codes=codes, scales=torch.ones_like(call.scales))
        x = torch.eye(256, dtype=torch.float16)
        out = torch.cat([emulated(*call._replace(x=part)) for part in x.view(8, 32, 256)])
        assert torch.equal(out, packed_gemm.reference(*call._replace(x=x))), form


def test_nan_and_infinity_pass(emulated: Any) -> None:
    call, weight = make(Case(3, 16, 256, groups=0), "e3m2", torch.float16)
    assert call.scales is not None
    call.scales[1] = torch.nan  # as of a group that held NaN: outputs 2 and 3
    call.x[0, 7], call.x[1, 9] = torch.nan, torch.inf
    out, exact = emulated(*call), expected(call, weight)[0]
    assert out[0].isnan().all()
    assert out[:, 2:4].isnan().all()
    rest = torch.tensor([0, 1, *range(4, 16)])
    assert torch.equal(out[1, rest], exact[1, rest].half())  # infinity, or NaN for a weight of 0
    assert out[2, rest].isfinite().all()


def test_memory_that_is_not_aligned_is_the_references(emulated: Any) -> None:
    call, _ = make(Case(2, 16, 256), "int8", torch.float16)
    odd = torch.empty(2 * 256 + 1, dtype=torch.float16)[1:].view(2, 256).copy_(call.x)
    with pytest.warns(FallbackWarning, match="x does not begin at a multiple of 16"):
        out = emulated(*call._replace(x=odd))
    torch.testing.assert_close(out, packed_gemm.reference(*call), rtol=0, atol=0)


def test_arguments_that_do_not_fit_are_refused_by_name(emulated: Any) -> None:
    call, _ = make(Case(2, 16, 256), "int8", torch.float16)
    torn = call._replace(group_size=96, scales=torch.ones(43))
    for message, wrong in (
        ("codes has 4096 bytes, expected 3840", call._replace(outputs=15)),
        ("scales has shape", call._replace(scales=torch.ones(3))),
        ("group_size is 96, expected whole rows", torn),
        ("bias has 3 elements, expected 16", call._replace(bias=call.x[0, :3])),
        ("activation is 4, expected 0 to 3", call._replace(activation=4)),
    ):
        with pytest.raises(RuntimeError, match=message):
            emulated(*wrong)


def quantized(shape: tuple[int, ...]) -> list[tuple[Any, Tensor]]:
    """Weights of the kinds that the front end takes, and what they are in float64."""
    torch.manual_seed(0)
    weight, found = torch.randn(shape) / 8, []
    for bits in (8, 4):
        for symmetric in (True, False):
            q = quant.quantize(weight, bits=bits, group_size=32, symmetric=symmetric)
            found.append((q, quant.dequantize(q, dtype=torch.float32).double()))
    for form in ("e3m2", "e4m3", "e4m7"):
        quantizer = quant.FPQuantizer(form, group_size=48)
        packed: Any = quantizer.quantize(weight)
        found.append((packed, quantizer.dequantize(packed, dtype=torch.float32).double()))
    return found


def close(got: Tensor, exact: Tensor) -> None:
    unit = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(got.double(), exact, rtol=unit, atol=unit)


@pytest.mark.usefixtures("emulated")
@EACH_DTYPE
def test_the_front_end_takes_every_kind_of_weight(dtype: torch.dtype) -> None:
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    for rows in (0, 1, 7, 67):
        x, bias = torch.randn(rows, 48).to(dtype), torch.randn(5).to(dtype)
        for weight, w in quantized((5, 48)):
            exact = functional.gelu(x.double() @ w.T + bias.double(), approximate="tanh")
            close(inference.mixed_gemm(x, weight, bias, activation="gelu"), exact)
    x = torch.randn(2, 3, 96).to(dtype)[..., ::2]
    weight, w = quantized((5, 48))[0]
    close(inference.mixed_gemm(x, weight), x.double() @ w.T)
    x, bias = torch.randn(7, 48).to(dtype), torch.randn(3, 5).to(dtype)
    for weight, w in quantized((3, 5, 48)):
        exact = torch.cat((x[:2].double() @ w[0].T, x[2:].double() @ w[2].T))
        exact += bias.double()[[0, 0, 2, 2, 2, 2, 2]]
        close(inference.mixed_moe_gemm(x, weight, ends, bias, activation="relu"), exact.relu())


@pytest.mark.usefixtures("emulated")
@EACH_DTYPE
def test_rows_are_multiplied_with_their_experts_matrix(dtype: torch.dtype) -> None:
    for inputs, outputs in ((48, 5), (7, 16), (1, 1)):
        x, w = torch.randn(9, inputs).to(dtype), torch.randn(4, outputs, inputs).to(dtype)
        ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
        exact = torch.cat((x[:4].double() @ w[1].double().T, x[4:].double() @ w[3].double().T))
        close(inference.moe_gemm(x, w, ends), exact)
        other = w.transpose(1, 2).contiguous().transpose(1, 2)
        close(inference.moe_gemm(x, other, ends, activation="silu"), functional.silu(exact))
        wider = torch.cat((w, w), 2)[..., :inputs]
        close(inference.moe_gemm(x, wider, ends), exact)
        assert inference.moe_gemm(x[:0], w, torch.zeros_like(ends)).shape == (0, outputs)


def test_the_kernel_takes_whole_loads_and_groups_within_rows() -> None:
    assert fits("e3m2", 4096, 512)
    assert fits("e3m2", 11008, 11008)
    assert fits("e3m2", 64, 128)  # two rows
    assert not fits("e3m2", 4096, 128)  # less than a warp takes at a time
    assert not fits("e3m2", 96, 96)
    assert not fits("int4", 4096, 192)
    assert fits("int4", 4096, 128)
    assert fits("plain", 24, 0)
    assert not fits("plain", 12, 0)


def test_wrong_arguments_are_refused_by_name() -> None:
    (weight, _), (experts, _) = quantized((5, 48))[0], quantized((3, 5, 48))[0]
    x, ends = torch.randn(7, 48), torch.tensor([2, 2, 7], dtype=torch.int32)
    for message, call in (
        ("weight has shape .3, 5, 48., expected 2", lambda: inference.mixed_gemm(x, experts)),
        ("weight has shape .5, 48., expected 3", lambda: inference.mixed_moe_gemm(x, weight, ends)),
        (r"x has shape .7, 47., weight has", lambda: inference.mixed_gemm(x[:, 1:], weight)),
        ("x has dtype float64", lambda: inference.mixed_gemm(x.double(), weight)),
        ("bias has dtype", lambda: inference.mixed_gemm(x, weight, torch.ones(5).half())),
        (r"bias has shape .4., expected .5.", lambda: inference.mixed_gemm(x, weight, x[0, :4])),
        ("activation is 'tanh'", lambda: inference.mixed_gemm(x, weight, activation="tanh")),
        ("offsets has dtype", lambda: inference.mixed_moe_gemm(x, experts, ends.long())),
        ("offsets has shape .2.", lambda: inference.mixed_moe_gemm(x, experts, ends[1:])),
        ("weight has dtype", lambda: inference.moe_gemm(x, torch.ones(3, 5, 48).half(), ends)),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            call()  # type: ignore[no-untyped-call]


def test_gradients_go_to_x_bias_and_plain_weights() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x, bias = torch.randn(5, 16, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    w = torch.randn(3, 4, 16, requires_grad=True)
    out = inference.moe_gemm(x, w, ends, bias)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, w, bias), grad)
    torch.testing.assert_close(found[0], torch.cat((grad[:2] @ w[0], grad[2:] @ w[2])))
    torch.testing.assert_close(found[1][2], grad[2:].T @ x[2:])
    by_expert = torch.stack((grad[:2].sum(0), grad[0] * 0, grad[2:].sum(0)))
    torch.testing.assert_close(found[2], by_expert)
    case = Case(3, 4, 64, ends=(2, 3), bias=True, activation="silu")
    call, _ = make(case, "int8", torch.float16)
    assert call.bias is not None
    wide = (call.x.double().requires_grad_(), call.bias.double().requires_grad_())
    assert torch.autograd.gradcheck(
        lambda x, b: packed_gemm.reference(*call._replace(x=x, bias=b)), wide
    )


def test_it_passes_opcheck_and_compiles_in_one_graph() -> None:
    call, _ = make(Case(3, 4, 64, ends=(2, 3), bias=True), "e3m2", torch.bfloat16)
    torch.library.opcheck(torch.ops.opkiln.packed_gemm.default, tuple(call))
    weight, experts = quantized((5, 48))[4][0], quantized((3, 5, 48))[0][0]
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)

    def layer(x: Tensor, packed: Tensor) -> tuple[Tensor, ...]:
        return (
            inference.mixed_gemm(x * 2, weight, activation="silu"),
            inference.mixed_moe_gemm(x, experts, ends),
            inference.moe_gemm(x, torch.ones(3, 5, 48), ends),
            packed_gemm(packed + 1, *call[1:]),
        )

    x = torch.randn(7, 48)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, eager in zip(compiled(x, call.x), layer(x, call.x), strict=True):
        torch.testing.assert_close(got, eager)


def test_fastgens_fp6_layer_multiplies_what_was_preprocessed() -> None:
    quantizer = quant.FPQuantizer("e3m2", group_size=64)
    numbers = quantizer.quantize(torch.randn(32, 64))
    ones = numbers._replace(scales=torch.ones_like(numbers.scales))
    weight = quantizer.dequantize(ones, dtype=torch.float16)
    two, four = core.preprocess_weight(weight)
    assert torch.equal(two, numbers.codes)
    x, scale = torch.randn(3, 64).half(), (torch.rand(32) / 16).half()
    out, scratch = torch.empty(3, 32, dtype=torch.float16), torch.empty(1)
    core.cuda_wf6af16_linear(out, x, two, four, scale, scratch, 32, 3, 64, 1)
    close(out, x.double() @ (weight.double() * scale.double()[:, None]).T)


def test_deepspeeds_functions_write_to_the_output() -> None:
    module: Any = OpModule("cutlass_ops")
    x, ends = torch.randn(7, 48).half(), torch.tensor([2, 2, 7])
    wide, bias = torch.randn(3, 48, 16).half() / 8, torch.randn(3, 16).half()
    exact = torch.cat((x[:2].double() @ wide[0].double(), x[2:].double() @ wide[2].double()))
    out = torch.empty(7, 16, dtype=torch.float16)
    module.moe_gemm(out, x, wide, None, ends, 6)
    close(out, exact)
    module.moe_gemm(out, x, wide, bias, ends, 1)
    close(out, (exact + bias.double()[[0, 0, 2, 2, 2, 2, 2]]).relu())
    weight = torch.randint(-127, 128, (3, 48, 16), dtype=torch.int8)
    scales = (torch.rand(3, 16) / 400).half()
    w = weight.double() * scales.double()[:, None]
    exact = torch.cat((x[:2].double() @ w[0], x[2:].double() @ w[2]))
    for function in (module.mixed_moe_gemm, module.moe_gemm):  # as MixedMoEGEMM calls it
        function(out.zero_(), x, weight, scales, None, ends, 8, 6)
        close(out, exact)
    module.mixed_gemm(out, x, weight[0], scales[0], bias[0], 8, 0)
    close(out, functional.gelu(x.double() @ w[0] + bias[0].double(), approximate="tanh"))
    with pytest.raises(UsageError, match="num_bits is 4, expected 8"):
        module.mixed_gemm(out, x, weight[0], scales[0], None, 4, 6)
    with pytest.raises(UsageError, match="expected a tensor"):
        module.moe_gemm(out, x, weight[0], None, 8, 6)  # as MixedGEMM calls it, without scales
