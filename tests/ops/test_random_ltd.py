"""``opkiln.nn.random_ltd``: tokens that are sorted, gathered and scattered, and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stand_in import emulated_functions, poisoned
from torch import Tensor

from opkiln.errors import UsageError
from opkiln.nn import random_ltd
from opkiln.ops.random_ltd import functions
from opkiln.testing import Make, op_tests

NAMES = (
    "token_sort", "token_sort_", "token_gather", "token_scatter", "token_scatter_", "token_spread",
    "token_clear", "mask_gather_bert", "mask_gather_gpt",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (0, 1, 17, 64)


def drawn(*shape: int, tokens: int, kept: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Different indices in each row, in no order."""
    return torch.rand(*shape, tokens).argsort(-1)[..., :kept].to(dtype)


def gathered(make: Make, size: int) -> tuple[Any, ...]:
    return make(3, 9, size), drawn(3, tokens=9, kept=4)


def scattered(make: Make, size: int) -> tuple[Any, ...]:
    return make(9, 3, size), make(4, 3, size), drawn(3, tokens=9, kept=4), False


TestGather = op_tests(random_ltd.token_gather, gathered, dtypes=DTYPES, sizes=SIZES)
TestScatter = op_tests(random_ltd.token_scatter, scattered, dtypes=DTYPES, sizes=SIZES)
TestScatterInPlace = op_tests(random_ltd.token_scatter_, scattered, sizes=SIZES)
TestSpread = op_tests(
    random_ltd.token_spread, lambda make, n: (make(3, 4, n), drawn(3, tokens=9, kept=4), 9),
    sizes=SIZES,
)  # fmt: skip
TestClear = op_tests(random_ltd.token_clear, gathered, sizes=SIZES)
TestSort = op_tests(
    random_ltd.token_sort, lambda make, n: (make.integers((3, n), 0, 1000), 1000), sizes=SIZES
)
TestBert = op_tests(
    random_ltd.mask_gather_bert,
    lambda make, n: (make(2, 1, n, n), drawn(3, 2, tokens=n, kept=n // 2)), sizes=SIZES,
)  # fmt: skip
TestGpt = op_tests(
    random_ltd.mask_gather_gpt, lambda make, n: (make(2, 3, n, n), n // 2), sizes=SIZES
)
for others in (TestSpread, TestClear, TestGpt):  # as TestGather and TestBert, of the same library
    pytest.mark.full(others)


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The CUDA kernels."""
    return emulated_functions(*(getattr(functions, name) for name in NAMES))


@pytest.fixture(params=["cpu", "cuda"])
def ops(request: pytest.FixtureRequest) -> Any:
    """The native versions: for the CPU, and for CUDA by the emulator."""
    if request.param == "cuda":
        return request.getfixturevalue("kernels")
    if not functions.token_sort.load("cpu"):
        pytest.skip(str(functions.token_sort.explain("cpu")))
    return functions


def by_hand(x: Tensor, part: Tensor | None, indices: Tensor) -> Tensor:
    """A scatter of batch-first tokens, one at a time."""
    out = x.clone()
    for b, row in enumerate(indices.tolist()):
        for k, index in enumerate(row):
            out[b, index] = 0 if part is None else part[b, k]
    return out


# Rows of 16-byte units, of 4-, 2- and 1-byte units; of one element; and longer than a block.
@pytest.mark.parametrize(
    ("dtype", "channels"),
    [(torch.float32, 64), (torch.bfloat16, 2048), (torch.float32, 33), (torch.bfloat16, 33),
     (torch.int8, 7), (torch.float64, 3), (torch.float32, 1), (torch.complex128, 5)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
def test_tokens_are_moved_whole(
    ops: Any, dtype: torch.dtype, channels: int, batch_first: bool
) -> None:
    torch.manual_seed(0)
    batch, tokens, kept = 3, 9, 5

    def laid(t: Tensor) -> Tensor:
        return t if batch_first else t.transpose(0, 1).contiguous()

    x = torch.randint(1, 100, (batch, tokens, channels)).to(dtype)
    part = torch.randint(1, 100, (batch, kept, channels)).to(dtype)
    for kind in (torch.int32, torch.int64):
        indices = drawn(batch, tokens=tokens, kept=kept, dtype=kind)
        picked = torch.stack([x[b, indices[b]] for b in range(batch)])
        with poisoned():
            got = ops.token_gather(laid(x), indices, batch_first)
            merged = ops.token_scatter(laid(x), laid(part), indices, batch_first)
            spread = ops.token_spread(laid(part), indices, tokens, batch_first)
            cleared = ops.token_clear(laid(x), indices, batch_first)
        written = laid(x).clone()
        ops.token_scatter_(written, laid(part), indices, batch_first)
        assert torch.equal(got, laid(picked))
        assert torch.equal(merged, laid(by_hand(x, part, indices)))
        assert torch.equal(written, merged)
        assert torch.equal(spread, laid(by_hand(torch.zeros_like(x), part, indices)))
        assert torch.equal(cleared, laid(by_hand(x, None, indices)))


def test_any_strides_and_addresses_are_read_and_written(ops: Any) -> None:
    indices = drawn(2, tokens=10, kept=6)[:, ::2]
    whole = torch.randn(1 + 2 * 10 * 12 * 2)
    for x in (
        whole[1:].view(2, 10, 24)[..., :12],
        whole[:-1].view(2, 12, 20)[..., :10].transpose(1, 2),
        whole[:-1].view(2, 20, 12)[:, ::2],
    ):
        part = torch.randn(2, 12, 3).transpose(1, 2)
        expected = functions.token_scatter.reference(x, part, indices)
        assert torch.equal(ops.token_scatter(x, part, indices), expected)
        picked = functions.token_gather.reference(x, indices)
        assert torch.equal(ops.token_gather(x, indices), picked)
        version = x._version
        ops.token_scatter_(x, part, indices)
        assert torch.equal(x, expected)
        assert x._version > version


def test_empty_tensors_are_served(ops: Any) -> None:
    for batch, tokens, kept, channels in ((0, 4, 2, 3), (2, 4, 0, 3), (2, 4, 2, 0), (2, 0, 0, 3)):
        indices = drawn(batch, tokens=tokens, kept=kept)
        x, part = torch.randn(batch, tokens, channels), torch.randn(batch, kept, channels)
        assert ops.token_gather(x, indices).shape == (batch, kept, channels)
        assert ops.token_scatter(x, part, indices).shape == x.shape
        assert torch.equal(ops.token_spread(part, indices, tokens),
                           functions.token_spread.reference(part, indices, tokens))  # fmt: skip
        assert ops.token_sort(indices, tokens).shape == indices.shape


@pytest.mark.parametrize(
    ("dtype", "tokens", "kept"),
    [
        (torch.int32, 1, 1), (torch.int64, 33, 32), (torch.int32, 100, 7),
        (torch.int64, 1023, 1000),
        pytest.param(torch.int32, 5000, 4999, marks=pytest.mark.full),
        pytest.param(torch.int64, 5000, 4999, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_indices_are_sorted(ops: Any, dtype: torch.dtype, tokens: int, kept: int) -> None:
    torch.manual_seed(0)
    indices = drawn(2, 3, tokens=tokens, kept=kept, dtype=dtype)
    expected = indices.sort(-1).values
    assert torch.equal(ops.token_sort(indices, tokens), expected)
    apart = indices.transpose(0, 1)
    version = indices._version
    ops.token_sort_(apart, tokens)
    assert torch.equal(indices, expected)
    assert indices._version > version
    # Twice the same, and more tokens than there are bits for.
    odd = torch.randint(tokens, (2, kept), dtype=dtype)
    for bound in (tokens, 1 << 40):
        assert torch.equal(ops.token_sort(odd, bound), odd.sort(-1).values)
        in_place = odd.clone()
        ops.token_sort_(in_place, bound)
        assert torch.equal(in_place, odd.sort(-1).values)


def test_long_rows_are_sorted(ops: Any) -> None:
    indices = drawn(1, tokens=65_536, kept=40_000)
    assert torch.equal(ops.token_sort(indices, 65_536), indices.sort(-1).values)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float16, torch.float32, torch.int64, torch.complex128], ids=str
)
def test_masks_are_those_of_the_kept_tokens(ops: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch, heads, tokens, kept, layers = 2, 2, 29, 19, 3
    mask = torch.randint(0, 2 if dtype == torch.bool else 100, (batch, heads, tokens, tokens))
    mask = mask.to(dtype)
    indices = drawn(layers, batch, tokens=tokens, kept=kept).sort(-1).values
    for given in (mask, mask.transpose(2, 3), mask[:1, :1].expand(batch, heads, -1, -1)):
        found = ops.mask_gather_bert(given, indices)
        assert found.shape == (layers, batch, heads, kept, kept)
        for layer in range(layers):
            for b in range(batch):
                at = indices[layer, b].long()
                assert torch.equal(found[layer, b], given[b][:, at][:, :, at])
        assert torch.equal(ops.mask_gather_gpt(given, kept), given[:, :, :kept, :kept])
        assert ops.mask_gather_gpt(given, 0).shape == (batch, heads, 0, 0)


@pytest.mark.parametrize("version", ["native", "reference"])
def test_wrong_arguments_are_named(ops: Any, version: str) -> None:
    x, part, indices = torch.randn(2, 5, 4), torch.randn(2, 3, 4), drawn(2, tokens=5, kept=3)
    mask = torch.zeros(2, 1, 5, 5)
    for message, name, args in (
        ("x has shape .*, expected 3 dimensions", "token_gather", (x[0], indices)),
        ("indices has dtype float32, expected int32 or int64", "token_gather", (x, part)),
        (r"indices has shape \[1, 3\], expected \[2, kept\]", "token_gather", (x, indices[:1])),
        (r"part has shape .*, expected \[2, 3, 4\]", "token_scatter", (x, x, indices)),
        ("part has dtype float16, x has float32", "token_scatter", (x, part.half(), indices)),
        ("tokens is -1, expected at least 0", "token_spread", (part, indices, -1)),
        ("tokens is -1, expected at least 0", "token_sort", (indices, -1)),
        ("mask has shape", "mask_gather_gpt", (mask[0], 3)),
        ("kept is 6, but mask is for 5 tokens", "mask_gather_gpt", (mask, 6)),
        (r"expected \[layers, 2, kept\]", "mask_gather_bert", (mask, indices)),
    ):
        function = getattr(ops, name) if version == "native" else getattr(functions, name).reference
        with pytest.raises(RuntimeError, match=message):
            function(*args)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
def test_gradients_of_gather_and_scatter_are_each_other(batch_first: bool) -> None:
    torch.manual_seed(0)
    indices = drawn(2, tokens=5, kept=3)

    def given(tokens: int) -> Tensor:
        shape = (2, tokens, 3) if batch_first else (tokens, 2, 3)
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    x, part = given(5), given(3)
    cases = (
        (functions.token_gather, (x, indices, batch_first)),
        (functions.token_scatter, (x, part, indices, batch_first)),
        (functions.token_spread, (part, indices, 5, batch_first)),
        (functions.token_clear, (x, indices, batch_first)),
    )
    for function, args in cases:
        assert torch.autograd.gradcheck(function, args)
        assert torch.autograd.gradgradcheck(function, args)
        assert torch.autograd.gradcheck(function.reference, args)


def test_a_layer_with_dropped_tokens_trains_compiled_and_eager() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(2, 6, 8, requires_grad=True)

    def step(x: Tensor, indices: Tensor) -> Tensor:
        part = layer(random_ltd.token_gather(x, indices))
        return random_ltd.token_scatter(x, part, indices)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for kept in (4, 3):
        indices = drawn(2, tokens=6, kept=kept)
        results = []
        for function in (step, compiled):
            out = function(x, indices)
            results.append((out, *torch.autograd.grad(out.sin().sum(), (x, layer.weight))))
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(eager, other)


def test_each_layer_and_sequence_has_tokens_of_its_own() -> None:
    mask = torch.randn(3, 1, 32, 32)
    torch.manual_seed(7)
    indices, masks = random_ltd.bert_sample_tokens(12, 32, 3, 4, "cpu", mask)
    assert indices.shape == (4, 3, 12)
    assert indices.dtype == torch.int32
    assert (indices.diff(dim=-1) > 0).all()
    assert len({tuple(row) for row in indices.view(-1, 12).tolist()}) == 12
    assert torch.equal(masks, functions.mask_gather_bert.reference(mask, indices))
    torch.manual_seed(7)
    again, part = random_ltd.gpt_sample_tokens(12, 32, 3, 4, attn_mask=mask)
    assert torch.equal(again, indices)
    assert part is not None
    assert torch.equal(part, mask[:, :, :12, :12])
    torch.manual_seed(7)
    expected = torch.multinomial(torch.ones(12, 32), 12).view(4, 3, 12).sort(-1).values
    assert torch.equal(indices.long(), expected)
    assert random_ltd.gpt_sample_tokens(5, 5, 1)[0].tolist() == [[[0, 1, 2, 3, 4]]]
    with pytest.raises(UsageError, match="reserved_length is 33, expected 1 to 32"):
        random_ltd.gpt_sample_tokens(33, 32, 3)
    with pytest.raises(UsageError, match="needs an attn_mask"):
        random_ltd.bert_sample_tokens(3, 32, 3)
