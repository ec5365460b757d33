"""DeepSpeed's module ``transformer_inference`` over opkiln's ops.

What is expected is written out in float64. ``test_compat_deepspeed_itself.py`` compares with
DeepSpeed's own Python code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_given import ABSENT, BATCH, HEADS, HIDDEN, SEQ, TYPES, Given, warm  # noqa: F401
from torch import Tensor
from torch.nn import functional

from opkiln.compat.deepspeed.modules import OpModule
from opkiln.errors import UsageError


@pytest.fixture(scope="module")
def module() -> OpModule:
    return OpModule("transformer_inference")


@pytest.fixture(params=TYPES, autouse=True)
def kind(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    name: str = request.param
    return name


@pytest.fixture
def given(kind: str) -> Given:
    return Given(kind)


def _norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gamma.double(), beta.double(), 1e-5)


def _rms(x: Tensor, gamma: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], gamma.double(), 1e-5)


def test_norms(module: Any, given: Given) -> None:
    x, residual = given.rows(), given.rows()
    bias, gamma, beta = (given.rows(HIDDEN) for _ in range(3))
    total = x.double() + bias.double() + residual.double()
    given.agrees(module.layer_norm(x, gamma, beta, 1e-5), _norm(x.double(), gamma, beta), 4)
    given.agrees(module.rms_norm(x, gamma, 1e-5), _rms(x.double(), gamma), 4)
    found = module._layer_norm_residual(x, bias, residual, gamma, beta, 1e-5)
    given.agrees(found, _norm(total, gamma, beta), 8)
    both = module.layer_norm_residual_store_pre_ln_res(x, bias, residual, gamma, beta, 1e-5)
    assert isinstance(both, list)
    given.agrees(both[0], _norm(total, gamma, beta), 8)
    given.agrees(both[1], total)
    both = module.pre_rms_norm(x, residual, gamma, 1e-5)
    assert isinstance(both, list)
    given.agrees(both[0], _rms(x.double() + residual.double(), gamma), 8)
    given.agrees(both[1], x.double() + residual.double())


def test_a_wrong_number_of_arguments_is_a_type_error_that_names_them(
    module: Any, kind: str
) -> None:
    for name, said in (("bias_add", r"\(x, bias\)"), ("vector_matmul", r"\(x, weight, async_op, ")):
        with pytest.raises(TypeError, match=f"{name} takes {said}"):
            getattr(module, f"{name}_{kind}")(torch.ones(1))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("bias_add", lambda x: x),
        ("bias_relu", torch.relu),
        ("bias_gelu", lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations_are_written_over_a_contiguous_input(
    module: Any, given: Given, kind: str, name: str, function: Any
) -> None:
    x, bias = given.rows(), given.rows(HIDDEN)
    expected = function(x.double() + bias.double())
    found = getattr(module, f"{name}_{kind}")(x, bias)
    assert found is x
    given.agrees(found, expected)
    x = given.rows(SEQ, BATCH, HIDDEN).transpose(0, 1)
    kept = x.clone()
    found = getattr(module, f"{name}_{kind}")(x, bias)
    assert torch.equal(x, kept)
    given.agrees(found, function(kept.double() + bias.double()))


def test_gates_are_the_second_half(module: Any, given: Given) -> None:
    x, bias = given.rows(), given.rows(HIDDEN)
    value, gate = (x.double() + bias.double()).chunk(2, -1)
    given.agrees(module.gated_activation(x, bias, 3), value * functional.gelu(gate))
    given.agrees(module.gated_activation(x, bias, 4), value * functional.silu(gate))
    with pytest.raises(UsageError, match="actFun is 1"):
        module.gated_activation(x, bias, 1)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("preln", [True, False])
@pytest.mark.parametrize("add_bias", [True, False])
def test_residuals_are_summed_in_place(
    module: Any, given: Given, kind: str, after: bool, preln: bool, add_bias: bool
) -> None:
    hidden, residual, attention = given.rows(), given.rows(), given.rows()
    attention_bias, final = given.rows(HIDDEN), given.rows(HIDDEN)
    h, r, a, b, f = (each.double() for each in (hidden, residual, attention, attention_bias, final))
    if after:
        expected = h + (r + a + b + f) / 2 if preln else r + h + f
    else:
        expected = h + a + (r + f + (b if add_bias else 0)) / 2
    found = getattr(module, f"residual_add_bias_{kind}")(
        hidden, residual, attention, attention_bias, final, 2, after, add_bias, preln
    )
    assert found is residual
    given.agrees(residual, expected)


def test_sums_of_two_are_written_where_deepspeed_writes_them(
    module: Any, given: Given, kind: str
) -> None:
    a, b = given.rows(), given.rows()
    expected = 0.5 * a.double() + b.double()
    assert module._vector_add(a, b, 0.5) is a
    given.agrees(a, expected)
    residual, mlp, coef = given.rows(), given.rows(), given.rows(1, 2 * HIDDEN, 1)
    one, two = coef.double().view(2, -1)
    expected = residual.double() * one + mlp.double() * two
    assert module.moe_res_matmul(residual, coef, mlp) is mlp
    given.agrees(mlp, expected)
    assert getattr(module, f"bias_residual_{kind}")(a, b, b) is a


def test_queries_and_keys_are_rotated_in_place(module: Any, given: Given) -> None:
    head, dim, offset, theta = HIDDEN // HEADS, 8, 3, 500.0
    q, k = given.rows(), given.rows()
    wide = [x.double().view(BATCH, HEADS, SEQ, head).clone() for x in (q, k)]
    angle = torch.arange(offset, offset + SEQ).double()[:, None] * theta ** (
        -torch.arange(dim // 2).double() / (dim // 2)
    )
    for x in wide:
        one, two = x[..., : dim // 2].clone(), x[..., dim // 2 : dim].clone()
        x[..., : dim // 2] = one * angle.cos() - two * angle.sin()
        x[..., dim // 2 : dim] = two * angle.cos() + one * angle.sin()
    found = module.apply_rotary_pos_emb(q, k, dim, offset, HEADS, True, theta)
    assert isinstance(found, list)
    assert found[0] is q
    assert found[1] is k
    for one, two in zip(found, wide, strict=True):
        given.agrees(one.view(two.shape), two, 2)


@pytest.mark.parametrize("mask_of", [None, (BATCH, SEQ), (BATCH, 1, SEQ, SEQ), (BATCH, 1, 1, SEQ)])
@pytest.mark.parametrize("alibi", [True, False])
@pytest.mark.parametrize("triangular", [True, False])
def test_softmax_is_written_over_the_scores(
    module: Any,
    given: Given,
    kind: str,
    mask_of: tuple[int, ...] | None,
    alibi: bool,
    triangular: bool,
) -> None:
    scores = given.rows(BATCH, HEADS, SEQ, SEQ)
    wide = scores.double() * 0.5
    mask = ABSENT
    if mask_of:
        mask = given.rows(*mask_of)
        wide = wide + mask.double().view(BATCH, 1, -1, SEQ)
    # Two ranks: the rows of both, of which this one's heads are the second half.
    slopes = given.rows(BATCH * HEADS * 2, 1, SEQ) if alibi else ABSENT
    if alibi:
        wide = wide + slopes.double().view(BATCH, 2 * HEADS, 1, SEQ)[:, HEADS:]
    if triangular:
        wide = wide.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -torch.inf)
    found = getattr(module, f"softmax_{kind}")(
        scores, mask, slopes, triangular, False, False, 1, False, 0.5, HEADS, 2
    )
    assert found is scores
    given.agrees(found, wide.softmax(-1), 2)


def test_softmax_sees_a_window(module: Any, given: Given, kind: str) -> None:
    scores = given.rows(BATCH, HEADS, SEQ, SEQ)
    far = torch.arange(SEQ)[:, None] - torch.arange(SEQ) >= 3
    expected = scores.double().masked_fill(far, -torch.inf).softmax(-1)
    found = getattr(module, f"softmax_{kind}")(
        scores, ABSENT, ABSENT, False, False, True, 3, False, 1.0, 0, 1
    )
    given.agrees(found, expected, 2)


def _int8(outputs: int, inputs: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, its scales as DeepSpeed keeps them (two more of each), and what they stand for."""
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scales = torch.rand(groups) / 1000
    kept = torch.cat((scales, torch.rand(2 * groups))).view(groups, 3)
    wide = weight.double().view(groups, -1) * scales.double().view(-1, 1)
    return weight, kept, wide.view(outputs, inputs)


@pytest.mark.parametrize("mode", ["plain", "transposed", "int8"])
def test_layers_with_weights(module: Any, given: Given, kind: str, mode: str) -> None:
    wide_of = 8.0  # sums of rounded products
    int8, transposed = mode == "int8", mode == "transposed"

    def weight(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
        if int8:
            return _int8(outputs, inputs, 4)
        made = given.weight(outputs, inputs)
        return made if transposed else made.t().contiguous(), ABSENT, made.double()

    def call(name: str, *args: Any) -> Any:
        return getattr(module, f"{name}_{kind}")(*args)

    x, residual, input_bias = given.rows(), given.rows(), given.rows(HIDDEN)
    gamma, beta, bias = given.rows(HIDDEN), given.rows(HIDDEN), given.rows(2 * HIDDEN)
    up, up_scale, up_wide = weight(2 * HIDDEN, HIDDEN)
    down, down_scale, down_wide = weight(HIDDEN, 2 * HIDDEN)
    narrow, narrow_scale, narrow_wide = weight(HIDDEN, HIDDEN)

    found = call("vector_matmul", x, up, False, up_scale, int8, transposed)
    given.agrees(found, x.double() @ up_wide.t(), wide_of)
    if int8:
        assert torch.equal(
            found, module.vector_matmul_int8(x, up, False, up_scale, int8, transposed)
        )
    normed = _norm(x.double(), gamma, beta)
    found = call(
        "qkv_gemm", x, up, up_scale, bias, gamma, beta, 1e-5, True, int8, transposed
    )  # fmt: skip
    assert isinstance(found, list)
    given.agrees(found[0], normed @ up_wide.t() + bias.double(), wide_of)
    given.agrees(found[1], normed, 4)
    found = call("rms_qkv_gemm", x, up, up_scale, gamma, 1e-5, int8, transposed)
    given.agrees(found[0], _rms(x.double(), gamma) @ up_wide.t(), wide_of)
    given.agrees(found[1], _rms(x.double(), gamma), 4)

    def mlp(norm: Tensor) -> Tensor:
        wide = norm @ up_wide.t() + bias.double()
        return functional.gelu(wide, approximate="tanh") @ down_wide.t()

    found = call("fused_gemm_gelu", x, up, up_scale, bias, down, down_scale, int8, transposed)
    given.agrees(found, mlp(x.double()), wide_of)
    total = x.double() + residual.double() + input_bias.double()
    for after, norm in (
        (True, _norm(total, gamma, beta)),
        (False, _norm(residual.double(), gamma, beta)),
    ):
        found = call(
            "mlp_gemm", x, residual, input_bias, up, down, bias, gamma, beta, 1e-5, True, after,
            up_scale, down_scale, int8, 1, transposed,
        )  # fmt: skip
        assert isinstance(found, list)
        given.agrees(found[0], mlp(norm), 2 * wide_of)
        given.agrees(found[1], norm, 8)

    total = x.double() + residual.double()
    value, gate = (_rms(total, gamma) @ up_wide.t()).chunk(2, -1)
    found = call(
        "rms_mlp_gemm", x, residual, up, narrow, gamma, 1e-5, up_scale, narrow_scale, int8, 4,
        transposed,
    )  # fmt: skip
    assert found[1] is residual
    given.agrees(residual, total)
    given.agrees(found[0], (value * functional.silu(gate)) @ narrow_wide.t(), 2 * wide_of)


def test_dequantized_weights_have_the_dtype_of_the_name(
    module: Any, given: Given, kind: str
) -> None:
    weight, scales, wide = _int8(8, 12, 4)
    given.agrees(getattr(module, f"dequantize_{kind}")(weight, scales, 4), wide)


def test_linear_layer_lays_out_heads_for_attention(module: Any, given: Given, kind: str) -> None:
    call = getattr(module, f"linear_layer_{kind}")
    x, weight, bias = given.rows(), given.weight(3 * HIDDEN, HIDDEN), given.rows(3 * HIDDEN)
    flat = call(x, weight, bias, True, False, HEADS, True, 1e4)
    given.agrees(flat, x.double() @ weight.double().t() + bias.double(), 8)
    found = call(x, weight, bias, True, True, HEADS, True, 1e4)
    head = HIDDEN // HEADS
    assert found.shape == (3, BATCH, HEADS, SEQ, 32)
    assert not found[..., head:].any()
    parts = flat.view(BATCH, SEQ, 3, HEADS, head).permute(2, 0, 3, 1, 4)
    assert torch.equal(found[..., :head], parts)


def test_padding_and_einsum(module: Any, given: Given, kind: str) -> None:
    head = HIDDEN // HEADS
    q, k, v = given.rows(), given.rows(), given.rows()
    heads = [x.view(BATCH, SEQ, HEADS, head).transpose(1, 2) for x in (q, k, v)]
    padded = getattr(module, f"pad_transform_{kind}")(q, k, v, HEADS, True)
    shapes = [(BATCH, HEADS, SEQ, 32), *[(BATCH, HEADS, 128, 32)] * 2]
    for one, each, shape in zip(padded, heads, shapes, strict=True):
        assert one.shape == shape
        assert torch.equal(one[:, :, :SEQ, :head], each)
        assert one.count_nonzero() == each.count_nonzero()
    plain = getattr(module, f"pad_transform_{kind}")(q, k, v, HEADS, False)
    assert all(torch.equal(one, two) for one, two in zip(plain, heads, strict=True))
    tokens, weight = given.rows(6, 3, 4), given.rows(6, 5)
    expected = torch.einsum("sec,sm->ecm", tokens.double(), weight.double())
    given.agrees(getattr(module, f"einsum_sec_sm_ecm_{kind}")(tokens, weight), expected, 8)


def test_the_module_has_the_names_of_deepspeeds(module: Any, kind: str) -> None:
    assert {f"softmax_{kind}", "layer_norm", "vector_matmul_int8"} <= set(dir(module))
    with pytest.raises(AttributeError):
        getattr(module, "layer_norm_fp16")  # noqa: B009 (DeepSpeed takes its own code then)
