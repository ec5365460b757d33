"""opkiln.quant: what its functions take, give and refuse, eager, compiled and differentiated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sample import child, wanted
from sample.references import references
from torch import Tensor

from opkiln import get_builder, ops, quant
from opkiln.errors import ToolchainError, UsageError
from opkiln.machine.binary import fatbin
from opkiln.machine.toolchain import hipcc, torch_sdk
from opkiln.ops.quantizer import quantize as front

reference = references("quantizer")

LAID = (1, 1, 1)


@pytest.fixture(params=["native", "reference"])
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the front end runs on: the native op, then the reference."""
    found: Any = reference
    if request.param == "native":
        try:
            found = get_builder("quantizer", backend="cpu").jit_load(verbose=False)
        except ToolchainError as error:
            pytest.skip(f"no native quantizer here: {error.what}")
    monkeypatch.setattr(front, "functions", found)
    return str(request.param)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Any:
    try:
        found = get_builder("quantizer", backend="cpu").jit_load(verbose=False)
    except ToolchainError as error:
        pytest.skip(f"no native quantizer here: {error.what}")
    monkeypatch.setattr(front, "functions", found)
    return found


@pytest.mark.usefixtures("served_by")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_tensor_comes_back_in_its_shape_and_dtype(bits: int, symmetric: bool) -> None:
    x = torch.randn(3, 5, 100, dtype=torch.bfloat16)
    q = quant.quantize(x, bits=bits, group_size=48, symmetric=symmetric)
    assert (q.shape, q.dtype, q.bits, q.group_size, q.symmetric) == (
        (3, 5, 100), torch.bfloat16, bits, 48, symmetric,
    )  # fmt: skip
    assert q.numel == 1500
    assert q.nbytes == 1500 * bits // 8 + 32 * 4 * (1 if symmetric else 2)
    back = quant.dequantize(q)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert (back - x).abs().max() < 8 / 2**bits
    assert quant.dequantize(q, dtype=torch.float32).dtype == torch.float32


@pytest.mark.usefixtures("served_by")
def test_two_halves_of_a_byte_are_neighbours_the_first_in_the_low_one() -> None:
    x = torch.tensor([7.0, -7.0, 1.0, 2.0, 3.0])
    q = quant.quantize(x, bits=4, group_size=16)
    assert q.values.tolist() == [0x97, 0x21, 0x03]
    assert quant.dequantize(q).tolist() == x.tolist()
    u = quant.quantize(torch.arange(16.0), bits=4, group_size=16, symmetric=False)
    assert u.values.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]


@pytest.mark.usefixtures("served_by")
def test_ties_go_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert quant.quantize(x).values.tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.usefixtures("served_by")
def test_a_tensor_that_is_not_contiguous_is_taken_in_its_logical_order() -> None:
    x = torch.randn(64, 48).t()
    for options in ({}, {"stochastic": True, "seed": 3}):
        q = quant.quantize(x, group_size=64, **options)
        same = quant.quantize(x.contiguous(), group_size=64, **options)
        assert torch.equal(q.values, same.values)
        expected = quant.dequantize(q)
        assert torch.equal(quant.fake_quantize(x, group_size=64, **options), expected)
        inside = x.clone(memory_format=torch.preserve_format)
        assert not inside.is_contiguous()
        assert quant.fake_quantize(inside, group_size=64, inplace=True, **options) is inside
        assert torch.equal(inside, expected)


@pytest.mark.usefixtures("served_by")
def test_swizzled_pieces_are_those_of_each_peer_and_come_back_in_order() -> None:
    nodes, devices, pipeline, group = 2, 3, 2, 16
    x = torch.arange(nodes * devices * pipeline * group).float() + 1
    q = quant.swizzle_quantize(
        x, nodes=nodes, devices_per_node=devices, pipeline=pipeline, group_size=group
    )
    assert q.swizzle == (nodes, devices, pipeline)
    # The greatest element of each group says which it is: groups ascend.
    tops = (q.scales * 127).round().div(group, rounding_mode="trunc").int() - 1
    expected = [
        (node * devices + device) * pipeline + piece
        for piece in range(pipeline) for device in range(devices) for node in range(nodes)
    ]  # fmt: skip
    assert tops.tolist() == expected
    assert torch.equal(quant.dequantize(q), quant.fake_quantize(x, group_size=group))


@pytest.mark.usefixtures("served_by")
def test_ranks_that_exchange_parts_agree_on_the_mean() -> None:
    ranks, part = 4, 512
    gradients = [torch.randn(ranks * part) for _ in range(ranks)]
    sent = [quant.quantize(g, group_size=64) for g in gradients]

    def piece(q: quant.Quantized, rank: int) -> quant.Quantized:
        return q._replace(
            values=q.values[rank * part :][:part], scales=q.scales[rank * 8 :][:8], shape=(part,)
        )

    reduced = [
        quant.quantized_reduce([piece(q, rank) for q in sent], mean=True) for rank in range(ranks)
    ]
    got = torch.cat([quant.dequantize(q) for q in reduced])
    mean = torch.stack(gradients).mean(0)
    assert (got - mean).norm() < 0.02 * mean.norm()


@pytest.mark.usefixtures("served_by")
def test_a_reduction_may_change_the_format_and_keeps_what_it_loses() -> None:
    parts = [quant.quantize(torch.randn(1000), group_size=48) for _ in range(3)]
    error = torch.zeros(1000)
    q = quant.quantized_reduce(parts, bits=4, group_size=64, symmetric=False, error=error)
    assert (q.bits, q.group_size, q.symmetric) == (4, 64, False)
    total = sum(quant.dequantize(p) for p in parts)
    torch.testing.assert_close(quant.dequantize(q) + error, total)
    assert error.abs().max() > 0


# Gradients, versions, graphs


@pytest.mark.usefixtures("native")
def test_the_gradient_of_fake_quantize_goes_straight_through() -> None:
    x = torch.randn(100, requires_grad=True)
    weights = torch.randn(100)
    (quant.fake_quantize(x, bits=4, group_size=16) * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    y = torch.randn(100, requires_grad=True)
    inside = quant.fake_quantize(y * 2, bits=4, group_size=16, inplace=True)
    (inside * weights).sum().backward()
    assert torch.equal(y.grad, weights * 2)
    both = torch.stack((x, y)).detach()

    def loss(one: Tensor) -> Tensor:
        return (quant.fake_quantize(one, bits=4, group_size=16) * weights).sum()

    grads = torch.func.vmap(torch.func.grad(loss))(both)
    assert torch.equal(grads, weights.expand(2, -1))


@pytest.mark.usefixtures("native")
def test_what_is_overwritten_in_place_is_noticed_by_autograd() -> None:
    x = torch.randn(64, requires_grad=True)
    y = x * 2
    loss = (y * y).sum()
    quant.fake_quantize(y, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    error = torch.zeros(64)
    version = error._version
    quant.quantize(x, error=error)
    assert error._version > version


@pytest.mark.usefixtures("native")
def test_quantize_asks_for_no_gradient() -> None:
    q = quant.quantize(torch.randn(64, requires_grad=True), symmetric=False)
    assert not q.scales.requires_grad
    assert not quant.dequantize(q).requires_grad


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.usefixtures("native")
def test_it_compiles_into_one_graph(backend: str) -> None:
    def call(x: Tensor, error: Tensor, offset: Tensor) -> tuple[Tensor, ...]:
        q = quant.quantize(
            x * 2, bits=4, group_size=64, stochastic=True, seed=1, offset=offset, error=error
        )
        reduced = quant.quantized_reduce([q, q], mean=True)
        return quant.dequantize(reduced) + 1, quant.fake_quantize(x, group_size=64)

    x, offset = torch.randn(500), torch.tensor(0)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for step in range(3):
        errors = [torch.full((500,), 0.01) for _ in range(2)]
        offset.fill_(step)
        expected = call(x, errors[0], offset)
        for ours, theirs in zip(compiled(x, errors[1], offset), expected, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(*errors)


def test_opcheck_finds_nothing(native: Any) -> None:
    x, error = torch.randn(100), torch.zeros(100)
    rounding = (8, 16, False, True, 1, 2)
    three = native.quantize(x, *rounding, *LAID)
    check = torch.library.opcheck
    check(native.quantize, (x, *rounding, *LAID))
    check(native.quantize, (x, *rounding, *LAID, torch.tensor(3)))
    check(native.quantize_with_feedback, (x, error, *rounding, *LAID))
    check(native.dequantize, (*three, 100, torch.bfloat16, 8, 16, False, *LAID))
    check(native.fake_quantize, (x.clone().requires_grad_(), *rounding))
    check(native.fake_quantize_, (x, *rounding))
    lists = [[each] * 2 for each in three]
    rest = (100, 8, 16, False, 0.5, 4, 32, True, False, 0, 0)
    check(native.quantized_reduce, (*lists, *rest))
    check(native.quantized_reduce_with_feedback, (error, *lists, *rest))


# Refusals


@pytest.mark.usefixtures("served_by")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits is 3, expected 4 or 8"),
        ({"group_size": 8}, "group_size is 8, expected a multiple of 8 from 16 to 65536"),
        ({"group_size": 20}, "group_size is 20"),
        ({"group_size": 131_072}, "group_size is 131072"),
        ({"error": torch.zeros(3)}, r"error has shape \(3,\), expected \(64,\)"),
        (
            {"error": torch.zeros(64, dtype=torch.float64)},
            "error has dtype float64, expected float32",
        ),
        ({"error": torch.zeros(128)[::2]}, "error is not contiguous"),
        ({"offset": torch.tensor(1.0)}, "offset_tensor has dtype float32, expected int64"),
        ({"offset": torch.zeros(2, dtype=torch.int64)}, "offset_tensor has 2 elements, expected 1"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        quant.quantize(torch.randn(64), **options)


@pytest.mark.usefixtures("served_by")
def test_a_wrong_tensor_is_refused_by_name() -> None:
    for call in (quant.quantize, quant.fake_quantize):
        with pytest.raises(UsageError, match=r"x has dtype float64, expected float32"):
            call(torch.randn(64, dtype=torch.float64))
        with pytest.raises(UsageError, match="x is not dense"):
            call(torch.eye(8).to_sparse())
    q = quant.quantize(torch.randn(64), symmetric=False)
    for changes, message in (
        ({"values": q.values[1:]}, "values has 63 elements, expected 64"),
        ({"values": q.values.to(torch.int8)}, "values has dtype int8, expected uint8"),
        ({"scales": q.scales.double()}, "scales has dtype float64, expected float32"),
        ({"offsets": q.scales[:0]}, "offsets has 0 elements, expected 1"),
        ({"group_size": 24}, "scales has 1 elements, expected 3"),
        ({"bits": 5}, "bits is 5"),
    ):
        with pytest.raises(UsageError, match=message):
            quant.dequantize(q._replace(**changes))
    with pytest.raises(UsageError, match=r"dtype is int32"):
        quant.dequantize(q, dtype=torch.int32)
    with pytest.raises(UsageError, match="x is a leaf that requires gradients"):
        quant.fake_quantize(torch.randn(16, requires_grad=True), inplace=True)
    with pytest.raises(UsageError, match="or a view of one"):
        quant.fake_quantize(torch.randn(32, requires_grad=True)[:16], inplace=True)


@pytest.mark.usefixtures("served_by")
def test_a_swizzle_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="x has 64 elements, expected a multiple of nodes"):
        quant.swizzle_quantize(torch.randn(64), nodes=2, devices_per_node=3, group_size=16)
    with pytest.raises(UsageError, match="pipeline is 0, expected at least 1"):
        quant.swizzle_quantize(
            torch.randn(64), nodes=2, devices_per_node=2, pipeline=0, group_size=16
        )


@pytest.mark.usefixtures("served_by")
def test_parts_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(UsageError, match="parts is empty"):
        quant.quantized_reduce([])
    one, other = (quant.quantize(torch.randn(n)) for n in (64, 65))
    with pytest.raises(UsageError, match=r"parts\[1\] has \(shape, bits, group_size, symmetric\)"):
        quant.quantized_reduce([one, other])
    order = quant.Swizzle(2, 2)
    with pytest.raises(UsageError, match=r"parts\[0\] is swizzled"):
        quant.quantized_reduce([one._replace(swizzle=order)])


def test_the_native_op_refuses_what_the_front_end_would_mend(native: Any) -> None:
    with pytest.raises(RuntimeError, match="x is not contiguous"):
        native.quantize(torch.randn(8, 8).t(), 8, 16, True, False, 0, 0, *LAID)
    three = native.quantize(torch.randn(64), 8, 16, True, False, 0, 0, *LAID)
    lists = [[three[0]] * 129, [three[1]] * 129, []]
    with pytest.raises(RuntimeError, match="values has 129 tensors, expected at most 128"):
        native.quantized_reduce(*lists, 64, 8, 16, True, 1.0, 8, 16, True, False, 0, 0)


# Loading


def test_importing_the_front_end_does_not_import_torch() -> None:
    code = "import sys, opkiln.quant; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("empty_store")
def test_the_reference_serves_with_one_warning_where_nothing_may_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPKILN_MODE", "cached")
    code = (
        "import warnings, torch\n"
        "from opkiln import quant\n"
        "x = torch.randn(100)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    back = quant.dequantize(quant.quantize(x))\n"
        "assert [w.category.__name__ for w in caught] == ['FallbackWarning'], caught\n"
        "assert (back - x).abs().max() < 0.05\n"
    )
    child.run(code, bare=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["packbits"]
    + [pytest.param(op, marks=pytest.mark.full) for op in ("quantizer", "deepspeed_quantizer")],
)
def test_it_is_translated_and_built_for_an_amd_gpu(name: str) -> None:
    if not hipcc.available():
        pytest.skip("no hipcc is installed: apt-get install hipcc")
    if torch_sdk.find() is None:
        pytest.skip("torch is not installed, and hipify is a part of it")
    sources = sorted((Path(ops.__file__).parent / name).iterdir())
    built = wanted.artifact(get_builder(name, backend="rocm", archs="gfx90a").op())
    assert fatbin.hip_images(built.path) == ("gfx90a",)
    assert sorted((Path(ops.__file__).parent / name).iterdir()) == sources


# The full range


def test_narrow_range_is_kept_and_handed_on_to_a_reduction() -> None:
    x = torch.tensor([-1.0, 1.0, *([0.0] * 14)])
    full = quant.quantize(x, bits=4, group_size=16, narrow_range=False)
    assert (full.narrow_range, full.scales.tolist()) == (False, [1 / 8])
    assert quant.dequantize(full)[:2].tolist() == [-1.0, 7 / 8]
    assert quant.fake_quantize(x, bits=4, group_size=16, narrow_range=False)[1] == 7 / 8
    total = quant.quantized_reduce([full, full])
    assert (total.narrow_range, total.scales.tolist()) == (False, [2 / 8])
    narrow = quant.quantized_reduce([full, full], narrow_range=True)
    assert narrow.narrow_range
    assert quant.dequantize(narrow)[:2].tolist() == [-2.0, pytest.approx(2.0, abs=0.3)]
    laid = quant.swizzle_quantize(
        x, nodes=1, devices_per_node=1, bits=4, group_size=16, narrow_range=False
    )
    assert torch.equal(laid.values, full.values)
